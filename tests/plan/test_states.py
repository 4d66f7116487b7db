"""Bytes of gradients and optimizer states, and that finding them needs no torch."""

import subprocess
import sys

import pytest

from llmtrain.plan.states import optimizer_bytes, training_bytes


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


def test_states_without_torch() -> None:
    code = "import sys; import llmtrain.plan.states; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
