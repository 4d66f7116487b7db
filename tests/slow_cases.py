"""Which cases of a parametrized test are fast: some(range(1, 9), 3, 8) marks all but two of them slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(values: Iterable[Any], *quick: Any) -> list[Any]:
    """All values to test; those not in `quick` are marked slow."""
    cases = list(values)
    assert all(value in cases for value in quick), f"{quick} are not all among {cases}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in cases]
