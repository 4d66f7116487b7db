"""Runs in groups: those with one setting, or with the same values of some config fields. Runs of a group are samples,
whose losses have a mean and a standard deviation; groups are what competes."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from llmtrain.config.schema import differences
from llmtrain.errors import UsageError, nearest

Row = dict[str, Any]
Values = dict[str, Any]
LOSSES = ("train_loss", "val_loss", "best_val_loss")
_SETTING = ("model", "data", "trainer")
"""Sections that decide what is trained. `run` has the seed, and the others say where a run is computed and written."""
_NOT_OF_A_SETTING = ("data.cache_dir", "data.num_workers")
# fmt: off
_T_QUANTILES = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201,
    12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086, 25: 2.060,
    30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}
# fmt: on
"""Degrees of freedom -> the 97.5 % quantile of Student's t distribution."""


def group_runs(rows: Sequence[Row], configs: Sequence[Values], fields: Sequence[str]) -> list[Row]:
    """Groups of runs with the same values of these config fields, in the order of the values; without fields: of runs
    with one setting. `rows` are their summaries, `configs` their configs in the current schema."""
    _check_fields(fields, configs)
    groups = []
    for members in _members(configs, fields):
        values = {field: field_value(configs[members[0]], field) for field in fields}
        groups.append({"values": values, **_statistics([rows[index] for index in members])})
    return sorted(groups, key=lambda group: [_order(value) for value in group["values"].values()])


def best_group(groups: Sequence[Row]) -> Row | None:
    """The group with the lowest mean of the best validation losses, and by how much it is lower than the next one.
    Groups with equal means are best together. None if fewer than two groups were evaluated, or if they differ in no
    field of the setting: a seed is not better than another."""
    evaluated = [group for group in groups if group["best_val_loss"]["n"]]
    fields = list(groups[0]["values"])
    if len(evaluated) < 2 or (fields and not any(map(is_of_setting, fields))):
        return None
    lowest = min(group["best_val_loss"]["mean"] for group in evaluated)
    best = [group for group in evaluated if group["best_val_loss"]["mean"] == lowest]
    others = [group["best_val_loss"]["mean"] for group in evaluated if group not in best]
    run_ids = [run_id for group in best for run_id in group["run_ids"]]
    close = []
    for group in evaluated:
        if group not in best and is_distinguishable(best[0]["best_val_loss"], group["best_val_loss"]) is False:
            close.append({"values": group["values"], "run_ids": group["run_ids"]})
    return {
        "run_id": run_ids[0] if len(best[0]["run_ids"]) == 1 else None,
        "run_ids": run_ids,
        "values": best[0]["values"],
        "best_val_loss": lowest,
        "margin": min(others) - lowest if others else 0.0,
        "not_distinguishable_from": close,
    }


def mixed_fields(configs: Sequence[Values], fields: Sequence[str]) -> list[str]:
    """Fields of the setting that differ between runs of one group."""
    found: set[str] = set()
    for members in _members(configs, fields):
        first, *others = [_setting(configs[index]) for index in members]
        for other in others:
            found |= {path for path, _, _ in differences(first, other)}
    return sorted(found)


def field_value(config: Values, path: str) -> Any:
    """The value of `section.field` or `section.field.inner`; None if there is none."""
    found: Any = config
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _members(configs: Sequence[Values], fields: Sequence[str]) -> list[list[int]]:
    """Which configs are in a group together, by their indexes. Values need not be hashable. The setting of a run
    without a config is unknown, and so not that of another."""
    found: list[tuple[object, list[int]]] = []
    for index, config in enumerate(configs):
        key: object = _setting(config)
        if fields:
            key = [field_value(config, field) for field in fields]
        for other, members in found:
            if key and other == key:
                members.append(index)
                break
        else:
            found.append((key, [index]))
    return [members for _, members in found]


def _statistics(rows: Sequence[Row]) -> Row:
    # A run that was repeated exactly is one sample, however many directories have it.
    samples = {str(row["state_sha256"] or row["path"]): row for row in rows}.values()
    losses = {}
    for name in LOSSES:
        found = [row[name] for row in samples if row[name] is not None and math.isfinite(row[name])]
        losses[name] = sample_statistics(found)
    return {"run_ids": [row["run_id"] for row in rows], "n": len(samples), **losses}


def sample_statistics(values: Sequence[float]) -> Row:
    """Number, mean, standard deviation and standard error of samples."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {
        "n": len(values),
        "mean": statistics.fmean(values) if values else None,
        "standard_deviation": deviation,
        "standard_error": None if deviation is None else deviation / math.sqrt(len(values)),
    }


def is_distinguishable(first: Row, second: Row) -> bool | None:
    """Whether the means of two groups of samples (sample_statistics) differ by more than chance explains: Welch's
    t-test, two-sided, at 5 %. The degrees of freedom are rounded down, which errs on the side of chance. None with a
    single sample in a group, of which nobody can tell."""
    if first["n"] < 2 or second["n"] < 2:
        return None
    variances = [group["standard_error"] ** 2 for group in (first, second)]
    difference = abs(first["mean"] - second["mean"])
    total = sum(variances)
    if total == 0.0:
        return bool(difference)
    parts = [each**2 / (group["n"] - 1) for each, group in zip(variances, (first, second), strict=True)]
    freedom = total**2 / sum(parts) if sum(parts) else math.inf
    return bool(difference > _t_quantile(freedom) * math.sqrt(total))


def _t_quantile(freedom: float) -> float:
    """The 97.5 % quantile of Student's t distribution, for degrees of freedom rounded down to those of the table."""
    known = max((each for each in _T_QUANTILES if each <= freedom), default=1)
    return _T_QUANTILES[known]


def is_of_setting(path: str) -> bool:
    """Whether a config field decides what is trained."""
    return path.split(".")[0] in _SETTING and path not in _NOT_OF_A_SETTING


def _setting(config: Values) -> Values:
    setting = {}
    for section in _SETTING:
        fields = config.get(section)
        if isinstance(fields, dict):
            setting[section] = {name: fields[name] for name in fields if is_of_setting(f"{section}.{name}")}
    return setting


def _check_fields(fields: Sequence[str], configs: Sequence[Values]) -> None:
    known = {path for config in configs for path in _paths(config, "")}
    for field in fields:
        if field not in known:
            raise UsageError(
                f"--group-by '{field}' is not a field of these configs.{nearest(field, known)}",
                remedy="Name a field with its section, such as trainer.lr; docs/config.md lists them.",
            )


def _paths(values: Values, prefix: str) -> Iterator[str]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _paths(value, f"{path}.")
        if prefix:  # a field; sections have none
            yield path


def _order(value: Any) -> tuple[bool, float, str]:
    """Numbers in their order, then everything else as text."""
    if isinstance(value, int | float):
        return (False, value, "")
    return (True, 0.0, str(value))
