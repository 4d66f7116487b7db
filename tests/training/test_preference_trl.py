"""Losses and gradients against those of TRL's trainers, which trl_fixture/record.py has recorded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from llmtrain.compat.numerics import Numerics
from llmtrain.config.objective import OBJECTIVES
from llmtrain.data.batches import Batch
from llmtrain.data.preferences.pair_batches import PairEvalBatches, PairSamples
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.store.example_store import ExampleStore, SourceFile
from llmtrain.models.group_losses import Groups
from llmtrain.models.hf.causal_lm import CausalLM
from llmtrain.training.components import build_objective

FIXTURE = Path(__file__).parent / "trl_fixture" / "losses.safetensors"
VALUES: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.1},
    "ipo": {"name": "ipo", "beta": 0.1},
    "orpo": {"name": "orpo", "beta": 0.1},
    "simpo": {"name": "simpo", "beta": 2.0, "gamma": 1.0},
}
pytestmark = pytest.mark.hf


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    with safe_open(FIXTURE, framework="pt") as file:
        found: dict[str, Any] = json.loads(file.metadata()["facts"])
    assert found["trl"]
    return found


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return load_file(FIXTURE)


class Model:
    """A Llama with recorded weights, as an objective uses it."""

    def __init__(self, shape: dict[str, Any], tensors: dict[str, torch.Tensor], which: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**shape)).float()
        weights = {name.removeprefix(f"{which}/"): each for name, each in tensors.items() if name.startswith(which)}
        model.load_state_dict({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
        self.module = CausalLM(model, Numerics())
        self.module.has_linear_head = True

    def loss(self, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = self.module(batch.inputs, batch.targets, batch.positions)
        return loss

    def group_losses(self, batch: Batch, groups: Groups) -> torch.Tensor:
        losses: torch.Tensor = self.module(batch.inputs, batch.targets, batch.positions, groups=groups)
        return losses


def samples_of(pairs: list[dict[str, list[int]]], packed: bool) -> PairSamples:
    """The recorded pairs, as the data module would have tokenized them."""
    ids: list[int] = []
    answers: list[int] = []
    spans = []
    for number, pair in enumerate(pairs):
        for side in ("chosen_ids", "rejected_ids"):
            begin = len(ids)
            ids += pair["prompt_ids"] + pair[side]
            answers += [0] * len(pair["prompt_ids"]) + [1] * len(pair[side])
            spans.append([begin, len(ids), 0, number])
    arrays = np.array(ids, np.uint16), np.array(answers, np.uint8), np.array(spans, np.int64)
    store = PairStore(ExampleStore(FIXTURE, *arrays, (SourceFile("pairs", "line"),), is_mapped=False))
    return PairSamples(store, np.arange(len(pairs)), 24, packed, 64)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_loss_and_every_gradient_are_those_of_trl(
    facts: dict[str, Any], tensors: dict[str, torch.Tensor], name: str, packed: bool
) -> None:
    pairs = facts["pairs"]
    if name == "orpo":  # without prompts, whose loss TRL adds
        pairs = [{**pair, "prompt_ids": pair["prompt_ids"][-1:]} for pair in pairs]
    objective = build_objective(OBJECTIVES[name](**VALUES[name]))
    batches = PairEvalBatches(samples_of(pairs, packed), 2)
    policy = Model(facts["shape"], tensors, "policy")
    reference = Model(facts["shape"], tensors, "reference")
    total = 0.0
    for batch in batches:
        assert batch.pairs is not None
        with torch.no_grad():
            log_probabilities = -reference.group_losses(batch, Groups(batch.pairs.answers, 2 * batch.pairs.total))
        known = batch._replace(pairs=batch.pairs._replace(reference=log_probabilities))
        loss = objective.sums(policy, known).loss / len(pairs)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(facts["losses"][name], rel=1e-5)
    for parameter_name, parameter in policy.module.model.named_parameters():
        expected = tensors[f"{name}/{parameter_name}"]
        assert parameter.grad is not None
        distance = (parameter.grad - expected).norm() / expected.norm()
        assert distance < 1e-5, parameter_name
