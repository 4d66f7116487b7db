"""Bytes of what training adds to the weights, from their number. Without torch."""

import math
from collections.abc import Iterable


def optimizer_bytes(optimizer: str, trained_bytes: int, matrices: int, element_size: int = 4, factored: int = 0) -> int:
    """The optimizer's averages: two per trained weight, or one for the weights of `matrices` with muon. Those of
    adafactor are `factored` numbers: see factored_numbers."""
    if optimizer == "adafactor":
        return factored * element_size
    averages = 2 * trained_bytes
    if optimizer == "muon":
        averages -= matrices * element_size
    return averages


def factored_numbers(shapes: Iterable[tuple[int, ...]]) -> int:
    """Numbers that adafactor keeps of trained weights: a row and a column of each matrix, and all of a vector."""
    total = 0
    for shape in shapes:
        count = math.prod(shape)
        total += count if len(shape) < 2 else count // shape[-1] + count // shape[-2]
    return total


def training_bytes(optimizer: str, trained: int, matrices: int, element_size: int = 4) -> int:
    """A gradient per trained weight, and the optimizer's averages. Those of adafactor, which need the shapes of the
    weights, are left out: less than a hundredth."""
    trained_bytes = element_size * trained
    return trained_bytes + optimizer_bytes(optimizer, trained_bytes, matrices, element_size)
