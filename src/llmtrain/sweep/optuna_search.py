"""Optuna's TPE sampler as a search (extra `optuna`). It learns from finished trials, so each bracket waits for the ones
before it. The study is built again for every bracket, from the table in order of trial number: what is proposed does
not depend on which trial finished first, nor on whether the driver was restarted."""

import importlib.util
from collections.abc import Sequence
from typing import Any

from llmtrain.core.install import install_command
from llmtrain.core.seeds import derive_seed
from llmtrain.errors import UsageError
from llmtrain.sweep.halving import rank_of
from llmtrain.sweep.search import Distinct, Point, draw
from llmtrain.sweep.space import Integers, Logarithmic, Space, SpaceField, Uniform, Values
from llmtrain.sweep.spec import SweepSpec

_MOST_DRAWS = 50


def check_installed() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(
            "search optuna needs the package optuna, which is not installed.",
            remedy=f"{install_command('optuna')}, or choose another search: halton, random or grid.",
        )


def propose(space: Space, spec: SweepSpec, earlier: Sequence[Point], trials: int) -> list[Values]:
    """The values of the next trials, given all earlier ones in order of their number."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=derive_seed(spec.seed, "optuna", len(earlier)) % 2**32)
    study = optuna.create_study(sampler=sampler, direction="maximize" if spec.is_higher_better else "minimize")
    scores = [point.score for point in earlier if point.score is not None]
    worst = max(scores, key=lambda score: rank_of(score, spec.is_higher_better), default=0.0)
    found = Distinct()
    for point in earlier:
        found.add(point.values)
        told = {each.path: each for each in space.fields if each.path in point.values}
        study.add_trial(
            optuna.trial.create_trial(
                params={path: _as_parameter(each, point.values[path]) for path, each in told.items()},
                distributions={path: _distribution(each) for path, each in told.items()},
                value=worst if point.score is None else point.score,
            )
        )
    before = len(found.values)
    for _ in range(trials * _MOST_DRAWS):
        if len(found.values) == before + trials:
            break
        asked = study.ask()
        values: Values = {}
        for each in space.fields:
            if each.applies(values):
                values[each.path] = _suggest(asked, each)
        found.add(values)
    proposed = found.values[before:]
    for values in draw(space, "halton", spec.seed, before + trials):  # where the sampler repeats itself
        if len(proposed) < trials and found.add(values):
            proposed.append(values)
    return proposed


def _distribution(each: SpaceField) -> Any:
    from optuna import distributions

    found = each.range
    if isinstance(found, Integers):
        return distributions.IntDistribution(found.low, found.high)
    if isinstance(found, Uniform | Logarithmic):
        return distributions.FloatDistribution(found.low, found.high, log=isinstance(found, Logarithmic))
    return distributions.CategoricalDistribution(tuple(range(found.count or 0)))


def _as_parameter(each: SpaceField, value: Any) -> Any:
    """A choice is its index: Optuna accepts few types of values."""
    values = getattr(each.range, "values", None)
    return value if values is None else values.index(value)


def _suggest(asked: Any, each: SpaceField) -> Any:
    found = each.range
    if isinstance(found, Integers):
        return asked.suggest_int(each.path, found.low, found.high)
    if isinstance(found, Uniform | Logarithmic):
        is_log = isinstance(found, Logarithmic)
        value = asked.suggest_float(each.path, found.low, found.high, log=is_log)
        return min(max(float(f"{value:.4g}"), found.low), found.high)
    return found.at((asked.suggest_categorical(each.path, list(range(found.count or 0))) + 0.5) / (found.count or 1))
