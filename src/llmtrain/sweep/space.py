"""The search space: which values each config field may have. The grammar of --space and of a sweep file.

trainer.lr=log(1e-3,1e-1)          one number, uniform in its logarithm
trainer.weight_decay=uniform(0,1)  one number
model.n_layers=int(2,8)            one integer, both ends included
trainer.optimizer=[adamw,muon]     one of these values
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import yaml

from llmtrain.config.document import parse_value
from llmtrain.config.yaml_errors import explain_value_error
from llmtrain.errors import UsageError

Values = dict[str, Any]
"""Config field -> value: what distinguishes a trial from the others."""
GRAMMAR = "[a,b], uniform(a,b), log(a,b) or int(a,b)"
_CALL = re.compile(r"(?P<name>\w+)\((?P<arguments>[^()]*)\)")
_FIELD = re.compile(r"[a-z_]+(\.\w+)+")
_DIGITS = 4
"""Significant digits of a number that is drawn from a range: it can be read and typed, and does not depend on the last
bits of the machine's logarithm."""


class Range(Protocol):
    """The values of one field."""

    @property
    def count(self) -> int | None:
        """How many values there are; None for a range of real numbers."""

    def at(self, share: float) -> Any:
        """The value at a share of the range, 0 to 1 (excluded)."""


@dataclass(frozen=True)
class Choice:
    values: tuple[Any, ...]

    @property
    def count(self) -> int | None:
        return len(self.values)

    def at(self, share: float) -> Any:
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]


@dataclass(frozen=True)
class Integers:
    low: int
    high: int

    @property
    def count(self) -> int | None:
        return self.high - self.low + 1

    def at(self, share: float) -> Any:
        return min(self.low + int(share * (self.high - self.low + 1)), self.high)


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    @property
    def count(self) -> int | None:
        return None

    def at(self, share: float) -> Any:
        return _rounded(self.low + share * (self.high - self.low), self.low, self.high)


@dataclass(frozen=True)
class Logarithmic:
    low: float
    high: float

    @property
    def count(self) -> int | None:
        return None

    def at(self, share: float) -> Any:
        value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        return _rounded(value, self.low, self.high)


@dataclass(frozen=True)
class SpaceField:
    path: str
    """`section.field`"""
    range: Range
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields before this one, and the values of each with which this field is varied; with others it keeps its value in
    the config."""

    def applies(self, values: Values) -> bool:
        return all(path in values and values[path] in accepted for path, accepted in self.when.items())


@dataclass(frozen=True)
class Space:
    fields: tuple[SpaceField, ...] = ()

    def at(self, shares: Mapping[str, float]) -> Values:
        """The values at a point; `shares` has a number from 0 to 1 per field."""
        values: Values = {}
        for each in self.fields:
            if each.applies(values):
                values[each.path] = each.range.at(shares[each.path])
        return values

    def combinations(self) -> Iterator[Values]:
        """All of them; the last field changes fastest. The space must be finite."""
        yield from _combinations(self.fields, {})

    def count(self, at_most: int) -> int | None:
        """The number of combinations, counted up to `at_most`; None for a space with ranges of real numbers."""
        if not self.is_finite:
            return None
        return sum(1 for _ in islice(self.combinations(), at_most))

    @property
    def is_finite(self) -> bool:
        return all(each.range.count is not None for each in self.fields)


def _combinations(fields: Sequence[SpaceField], values: Values) -> Iterator[Values]:
    if not fields:
        yield values
        return
    first, *others = fields
    if not first.applies(values):
        yield from _combinations(others, values)
        return
    count = first.range.count or 0
    for index in range(count):
        value = first.range.at((index + 0.5) / count)
        yield from _combinations(others, {**values, first.path: value})


def parse_space(text: str) -> dict[str, str]:
    """Field -> range, of the text of --space. Spaces separate fields, except inside brackets."""
    found: dict[str, str] = {}
    for part in _split(text, str.isspace):
        path, equals, value = part.partition("=")
        if not equals:
            path, value = part, ""
        if path in found:
            raise UsageError(f"space {path} is given twice.", remedy="Write all its values in one list, such as [4,8].")
        found[path] = value
    return found


def read_space(values: Mapping[str, Any], problems: list[str]) -> Space:
    """The space of --space or of a file, where a field has a text, a list, or a mapping with `values` and `when`. What
    is wrong is added to `problems`."""
    fields: list[SpaceField] = []
    for path, value in values.items():
        if not _FIELD.fullmatch(path):
            problems.append(f"space {path}: write it as section.field={GRAMMAR}, such as trainer.lr=log(1e-4,1e-2).")
            continue
        when: dict[str, tuple[Any, ...]] = {}
        if isinstance(value, Mapping):
            when = _read_when(path, value, [each.path for each in fields], problems)
            value = value.get("values")
        try:
            fields.append(SpaceField(path, read_range(value), when))
        except ValueError as problem:
            problems.append(f"space {path}: {problem}")
    return Space(tuple(fields))


def _read_when(
    path: str, value: Mapping[str, Any], before: Sequence[str], problems: list[str]
) -> dict[str, tuple[Any, ...]]:
    unknown = sorted(set(value) - {"values", "when"})
    if unknown:
        problems.append(f"space {path}: unknown {', '.join(unknown)}. A mapping has `values` and `when`.")
    conditions = value.get("when") or {}
    if not isinstance(conditions, Mapping):
        problems.append(f"space {path}.when must be a mapping, such as {{trainer.optimizer: muon}}.")
        return {}
    found = {}
    for name, accepted in conditions.items():
        if name not in before:
            problems.append(f"space {path}.when: '{name}' must be a field of the space that is written before {path}.")
        found[name] = tuple(accepted) if isinstance(accepted, list) else (accepted,)
    return found


def read_range(value: Any) -> Range:
    """Raises ValueError with what is wrong."""
    if isinstance(value, list | tuple):
        return _choice(value)
    text = str(value).strip() if isinstance(value, str) else ""
    if text.startswith("["):
        try:
            return _choice(parse_value(text))
        except (yaml.YAMLError, ValueError) as problem:
            if isinstance(problem, _EmptyRangeError):
                raise
            raise ValueError(explain_value_error(problem, text)) from None
    match = _CALL.fullmatch(text)
    if match is None or match["name"] not in ("uniform", "log", "int"):
        raise ValueError(f"must be {GRAMMAR}, got {value!r}.")
    low, high = _two_numbers(text, match["arguments"])
    if match["name"] == "int":
        return _integers(text, low, high)
    if low >= high:
        raise ValueError(f"{text} is empty: the first number must be below the second.")
    if not math.isfinite(high - low):
        raise ValueError(f"{text} is too wide: its numbers must differ by less than 1e308.")
    if match["name"] == "uniform":
        return Uniform(low, high)
    if low <= 0:
        raise ValueError(f"{text}: a logarithmic range must begin above 0, got {low:g}.")
    return Logarithmic(low, high)


class _EmptyRangeError(ValueError):
    pass


def _choice(values: Any) -> Choice:
    if not isinstance(values, list | tuple) or not values:
        raise _EmptyRangeError("the list is empty: write at least one value, such as [4,8].")
    distinct: list[Any] = []
    for value in values:
        if not any(value == other and type(value) is type(other) for other in distinct):
            distinct.append(value)
    return Choice(tuple(distinct))


def _two_numbers(text: str, arguments: str) -> tuple[float, float]:
    parts = [part.strip() for part in arguments.split(",")]
    try:
        low, high = (float(part) for part in parts)
    except ValueError:
        raise ValueError(f"{text} must have two numbers, such as log(1e-4,1e-2).") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{text}: both numbers must be finite.")
    return low, high


def _integers(text: str, low: float, high: float) -> Integers:
    if low != int(low) or high != int(high):
        raise ValueError(f"{text}: both numbers must be integers.")
    if low > high:
        raise ValueError(f"{text} is empty: the first number must not be above the second.")
    return Integers(int(low), int(high))


def _rounded(value: float, low: float, high: float) -> float:
    return min(max(float(f"{value:.{_DIGITS}g}"), low), high)


def _split(text: str, is_separator: Any) -> list[str]:
    """The parts of a text between separators that are outside of brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "[({") - (character in "])}")
        if is_separator(character) and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part]
