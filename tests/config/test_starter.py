"""The values that `llmtrain init` chooses for a file of examples. commands/test_init.py trains with what it writes."""

import math

import pytest
import yaml

from llmtrain.config.starter import ExampleSizes, ExampleSource, examples_config


@pytest.mark.parametrize("examples", [2, 5, 50, 300, 4000, 100_000])
@pytest.mark.parametrize("tokens", [35, 120, 400, 1500])
def test_length_batch_and_steps_follow_from_the_examples(examples: int, tokens: int) -> None:
    document = yaml.safe_load(
        examples_config(
            [ExampleSource("a.jsonl", "instruct_jsonl", {}, ExampleSizes(examples, tokens, tokens))], "my.yaml"
        )
    )
    block_size, trainer = document["model"]["block_size"], document["trainer"]
    assert tokens < block_size <= max(128, 3 * tokens), "no example is truncated, and memory is not wasted"
    assert trainer["micro_batch_size"] * block_size <= 2048
    is_packed = document["data"].get("packing", True)
    per_sequence = block_size // tokens if is_packed else 1
    batch = trainer["micro_batch_size"] * trainer["grad_accum_steps"]
    epoch_steps = math.ceil(int(examples * 0.95) / per_sequence / batch)
    steps = trainer["max_epochs"] * epoch_steps
    assert steps >= 40
    assert steps <= 150 or trainer["max_epochs"] == 1
    assert trainer["warmup_steps"] <= steps / 10
    assert trainer["eval_every_steps"] < steps


def test_longest_block_is_bounded() -> None:
    sizes = ExampleSizes(1000, 50_000, 90_000)
    document = yaml.safe_load(examples_config([ExampleSource("a.jsonl", "chat_jsonl", {}, sizes)], "my.yaml"))
    assert (document["model"]["block_size"], document["trainer"]["micro_batch_size"]) == (2048, 1)
