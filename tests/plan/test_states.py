"""Bytes of gradients and optimizer states, and that finding them needs no torch."""

import subprocess
import sys

import pytest
import torch
from tests.plan.plan_cases import CPU, GPT2, MODERN, make_config

from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.formula import estimate_by_formula
from llmtrain.plan.memory import estimate_memory
from llmtrain.plan.states import factored_numbers, optimizer_bytes, training_bytes


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [("adamw", 3.0), ("muon", 2.5), ("adafactor", 1.0)],
)
@pytest.mark.parametrize("element_size", [2, 4])
def test_copies_of_the_trained_weights(optimizer: str, copies: float, element_size: int) -> None:
    trained = 1000  # half of them in matrices that muon orthogonalizes
    assert training_bytes(optimizer, trained, 500, element_size) == copies * trained * element_size
    averages = optimizer_bytes(optimizer, trained * element_size, 500, element_size)
    assert averages == (copies - 1) * trained * element_size


def test_only_muon_has_one_average_per_matrix() -> None:
    assert optimizer_bytes("adamw", 4000, 500) == optimizer_bytes("adamw", 4000, 0) == 8000
    assert optimizer_bytes("muon", 4000, 1000) == 4000


def test_numbers_of_adafactor_are_those_that_torch_keeps() -> None:
    shapes = [(64, 48), (7,), (4, 6, 10), ()]
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = torch.optim.Adafactor(weights)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    kept = 0
    for state in optimizer.state.values():
        kept += sum(value.numel() for name, value in state.items() if name != "step" and value is not None)
    assert factored_numbers(shapes) == kept


@pytest.mark.parametrize("model", [GPT2, GPT2 | {"tie_embeddings": False}, MODERN, MODERN | {"mlp": "swiglu"}])
def test_formula_counts_adafactor_as_the_trace_does(model: dict[str, object]) -> None:
    config = make_config(model, optimizer="adafactor")
    traced = estimate_memory(config, fake_model(config, "cpu"), CPU)
    _, computed = estimate_by_formula(config, CPU)
    assert 0 < traced.optimizer < traced.weights / 10
    assert computed.optimizer == traced.optimizer
    assert computed.checkpoint == traced.checkpoint


def test_states_without_torch() -> None:
    code = "import sys; import llmtrain.plan.states; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
