"""Successive halving in synchronous brackets (Jamieson and Talwalkar 2016): all trials of a bracket train to the first
rung, the best share of them to the next one, and so on. A rung is a number of steps, and a promotion is a resume.

Which trials are promoted depends on the bracket, the rung, the trials' numbers and the metric: nothing here knows which
of them finished first, or on how many workers.
"""

from collections.abc import Mapping, Sequence

Ranking = tuple[float, int]
"""(rank, trial number), where the rank is a score and not a place: the lower is better, and trials with equal ranks are
in the order of their numbers."""
WORST = float("inf")
"""The rank of a trial that diverged or failed."""


def rank_of(score: float | None, is_higher_better: bool) -> float:
    """A score as what is compared, of which the lower is better; None, of a trial without one, is the worst."""
    if score is None:
        return WORST
    return -score if is_higher_better else score


def rungs_to(max_steps: int, first: int, eta: int) -> list[int]:
    """The steps of the rungs: max_steps, and that divided by eta once, twice, ... while it is not below `first`."""
    found = [max_steps]
    while found[-1] // eta >= first:
        found.append(found[-1] // eta)
    return found[::-1]


def brackets_of(trials: int, size: int) -> list[range]:
    """The numbers of the trials of each bracket; the last may have fewer."""
    return [range(first, min(first + size, trials)) for first in range(0, trials, size)]


def kept_of(trials: int, eta: int) -> int:
    """How many of the trials of a rung train on."""
    return max(1, trials // eta)


def promoted(ranks: Mapping[int, float], eta: int) -> list[int]:
    """The trials of a complete rung that train on, best first: one in eta, and at least one. A trial that diverged is
    never promoted."""
    best_first: list[Ranking] = sorted((rank, number) for number, rank in ranks.items())
    kept = kept_of(len(best_first), eta)
    return [number for rank, number in best_first[:kept] if rank < WORST]


def steps_of(bracket: Sequence[int], rungs: Sequence[int], eta: int) -> int:
    """The steps that a bracket trains altogether, if no trial ends early."""
    total = 0
    before = 0
    size = len(bracket)
    for steps in rungs:
        total += size * (steps - before)
        before = steps
        size = kept_of(size, eta)
    return total
