"""Documents of schema version 1 mean what they meant: tokenizer, batch, checkpoints and log of every rank."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
from fault_harness import RUN_ID

from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config

HF_TEXT = "schema_version: 1\nmodel: {vocab_size: 50257}\ndata: {name: hf_text, dataset_name: wikitext}\n"


def load(text: str, *overrides: str) -> Config:
    return build_config(parse_document(text, "test"), overrides)


class TestFilledIn:
    def test_hf_text_has_gpt2s_tokens(self) -> None:
        assert load(HF_TEXT).data.tokenizer == "gpt2"
        assert load(HF_TEXT, "data.tokenizer=byte").data.tokenizer == "byte"
        assert load(HF_TEXT.replace("wikitext}", "wikitext, tokenizer: byte}")).data.tokenizer == "byte"

    def test_an_override_of_the_dataset_counts(self) -> None:
        assert load(HF_TEXT, "data.name=dummy_text").data.tokenizer is None
        assert load("schema_version: 1", "data.name=hf_text", "data.dataset_name=wikitext").data.tokenizer == "gpt2"

    @pytest.mark.parametrize("text", ["schema_version: 1", "schema_version: 1\ntrainer:\nlogging:\n"])
    def test_batch_checkpoints_and_log(self, text: str) -> None:
        config = load(text)
        assert config.trainer.scale_batch is True
        assert config.trainer.keep_checkpoints == "all"
        assert config.logging.all_ranks is True

    def test_a_value_of_the_document_stays(self) -> None:
        text = "schema_version: 1\ntrainer: {keep_checkpoints: 5, scale_batch: false}\nlogging: {all_ranks: false}"
        config = load(text)
        assert (config.trainer.keep_checkpoints, config.trainer.scale_batch) == (5, False)
        assert config.logging.all_ranks is False

    def test_version_2_is_left_alone(self) -> None:
        config = load(HF_TEXT.replace("schema_version: 1", "schema_version: 2"))
        assert config.data.tokenizer is None
        assert (config.trainer.scale_batch, config.trainer.keep_checkpoints) == (False, 3)
        assert config.logging.all_ranks is False


def test_print_config_shows_it_and_one_note_says_it(cli: Callable[..., Any], workdir: Path) -> None:
    (workdir / "old.yaml").write_text(HF_TEXT)
    done = cli("print-config", "--config", "old.yaml", "--json")
    assert done.json["data"]["tokenizer"] == "gpt2"
    (note,) = [line for line in done.err.splitlines() if line.startswith("note: ")]
    for field in ("data.tokenizer", "trainer.scale_batch", "trainer.keep_checkpoints", "logging.all_ranks"):
        assert field in note
    assert "note:" not in cli("print-config", "--config", "gpt_smoke").err


def version_1(root: Path, cache: Path, **trainer: Any) -> Config:
    """The harness's tiny run, as a version-1 document has it."""
    values = harness.tiny_config(root, cache).as_dict()
    old = {
        "schema_version": 1,
        "run": {"name": "tiny", "seed": 7, "device": "cpu"},
        "model": {name: values["model"][name] for name in ("name", "block_size", "d_model", "n_layers", "n_heads")},
        "data": {name: values["data"][name] for name in ("name", "cache_dir")},
        "trainer": {"max_steps": 8, "micro_batch_size": 2, "warmup_steps": 2, "save_every_steps": 2, **trainer},
        "ddp": {"enabled": True, "backend": "gloo"},
        "output": {"root_dir": str(root), "run_id": RUN_ID},
    }
    return load(json.dumps(old), "run.threads=1", "trainer.log_every_steps=1", "trainer.eval_batches=2")


def test_grad_accum_steps_count_per_process(tmp_path: Path, cache: Path) -> None:
    tokens = []
    for count in (1, 2):
        config = version_1(tmp_path / str(count) / "runs", cache, grad_accum_steps=1)
        ends = harness.run_world(config, count)
        assert ends[0].result, ends[0].output
        tokens.append(ends[0].result["tokens"])
    assert tokens[1] == 2 * tokens[0]


def test_every_checkpoint_is_kept_and_every_rank_logs(tmp_path: Path, cache: Path) -> None:
    root = tmp_path / "runs"
    ends = harness.run_world(version_1(root, cache, grad_accum_steps=1), 2)
    assert [ended.code for ended in ends] == [0, 0], ends[0].output
    assert harness.steps_saved(root) == [2, 4, 6, 8]
    for ended in ends:
        assert ended.output.count("[TRAIN] ") >= 8
    resumed = harness.run(version_1(root, cache, grad_accum_steps=2), str(root / RUN_ID / "checkpoints" / "step_2.pt"))
    assert resumed.code == 64, "other micro-batches"
