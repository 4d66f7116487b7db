"""Encoding of values as JSON: whatever files contain, the text is valid JSON, and ASCII. (What is shown of a run:
run_values.py.)"""

import json
import math
from typing import Any

from llmtrain.errors import LlmtrainError

_MAX_BITS = 1024
"""Maximum size of an integer; beyond that a browser reads it as infinite, and Python may refuse to write it."""


def json_text(value: Any) -> str:
    """Numbers that JSON does not have become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_without_special_numbers(value), separators=(",", ":"), allow_nan=False)


def message(problem: LlmtrainError) -> dict[str, Any]:
    return {"what": problem.what, "remedy": problem.remedy}


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """`section.field` -> value as it is shown (see plain). An empty section is a value."""
    found: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                add(f"{path}.{name}" if path else str(name), inner)
        elif path:
            found[path] = plain(value)

    add("", values)
    return found


def plain(value: Any) -> Any:
    """A value of a config: numbers, text and null as they are; lists and empty sections as JSON, which is YAML too."""
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else json.dumps(value, ensure_ascii=False, default=str)


def _without_special_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_special_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_special_numbers(each) for each in value]
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else None
    return None if isinstance(value, float) and not math.isfinite(value) else value
