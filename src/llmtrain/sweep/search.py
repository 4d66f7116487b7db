"""Which values each trial has: a function of the seed and the trial's number, never of what finished first."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice

from llmtrain.core.seeds import derive_seed
from llmtrain.sweep.space import Space, Values

_MOST_DRAWS = 200
"""Draws per trial until one is new. Of a finite space the missing combinations are then taken in the grid's order."""


@dataclass(frozen=True)
class Point:
    """The outcome of an earlier trial, for a search that learns from it."""

    values: Values
    score: float | None
    """None for a trial that diverged or failed."""


def grid(space: Space, seed: int) -> Iterator[Values]:  # noqa: ARG001 (as the other searches)
    yield from space.combinations()


def uniform(space: Space, seed: int) -> Iterator[Values]:
    for number in count():
        yield space.at({each.path: _random(seed, number, each.path) for each in space.fields})


def halton(space: Space, seed: int) -> Iterator[Values]:
    """A quasi-random sequence (Halton 1964): its points fill the space more evenly than random ones. The digits of each
    dimension are permuted, without which high dimensions are correlated, and shifted, both by the seed."""
    bases = list(islice(_primes(), len(space.fields)))
    for number in count(1):
        shares = {}
        for base, each in zip(bases, space.fields, strict=True):
            digits = list(range(1, base))
            random.Random(derive_seed(seed, "digits", each.path)).shuffle(digits)
            shift = _random(seed, 0, each.path)
            shares[each.path] = (_radical_inverse(number, base, [0, *digits]) + shift) % 1.0
        yield space.at(shares)


SEARCHES: dict[str, Callable[[Space, int], Iterator[Values]]] = {"grid": grid, "random": uniform, "halton": halton}
"""Values of `search` that do not look at results. `optuna` does: optuna_search.py."""


def draw(space: Space, search: str, seed: int, trials: int) -> list[Values]:
    """The values of so many trials, all different; fewer if the space has fewer combinations."""
    found = Distinct()
    draws = SEARCHES[search](space, seed)
    for values in islice(draws, trials * _MOST_DRAWS):
        found.add(values)
        if len(found.values) == trials:
            return found.values
    if space.is_finite:
        for values in space.combinations():
            found.add(values)
            if len(found.values) == trials:
                break
    return found.values


class Distinct:
    """Values of trials, without repetition."""

    def __init__(self) -> None:
        self.values: list[Values] = []
        self._seen: set[str] = set()

    def add(self, values: Values) -> bool:
        """Whether they are new."""
        key = repr(sorted(values.items()))
        if key in self._seen:
            return False
        self._seen.add(key)
        self.values.append(values)
        return True


def _random(seed: int, number: int, path: str) -> float:
    return random.Random(derive_seed(seed, "sweep", number, path)).random()


def _radical_inverse(number: int, base: int, digits: list[int]) -> float:
    """The digits of a number in this base, permuted and mirrored at the point: 6 = 110 in base 2 -> 0.011."""
    result = 0.0
    share = 1.0 / base
    while number:
        result += digits[number % base] * share
        number //= base
        share /= base
    return result


def _primes() -> Iterator[int]:
    for number in count(2):
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            yield number
