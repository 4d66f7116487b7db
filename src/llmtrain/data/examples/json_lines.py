"""Reading a file of JSON lines, strictly UTF-8, a line at a time."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.data.types import BadExample
from llmtrain.errors import DataError


class Line(NamedTuple):
    number: int
    value: dict[str, Any] | BadExample
    """The object of the line, or why there is none."""


def find_file(name: str, field: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(
            f"{field}: {name} is a directory, but one file of JSON lines is needed.",
            remedy="Give the directory of a dataset as data.dataset_name, and set data.train_file and data.val_file to "
            "null; or name a file in it.",
        )
    if not path.is_file():
        raise DataError(
            f"{field}: there is no file {name}.", remedy="Paths are relative to the directory the command is run in."
        )
    return path


def read_json_lines(path: Path, name: str) -> Iterator[Line]:
    """The lines that are not blank. `name` is how the user calls the file."""
    lines = _lines(path, name)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{name} is empty.", remedy="It needs one JSON object a line.")
    if first[1].startswith(b"["):
        raise DataError(
            f"{name} is a JSON array, but one JSON object a line is needed.",
            remedy=f"Convert it: jq -c '.[]' {name} > rows.jsonl",
        )
    return (Line(number, _parse(line)) for number, line in chain([first], lines))


def count_lines(path: Path, name: str) -> int:
    return sum(1 for _ in _lines(path, name))


def _lines(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if content:
                    yield number, content
    except OSError as problem:
        raise DataError(f"{name} cannot be read: {problem.strerror or problem}.") from None


class _KeyGivenTwice(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As json makes it, but a key that is given twice is an error: one of the two would be lost silently."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyGivenTwice(f"key {next(key for key in keys if keys.count(key) > 1)!r:.60} is given twice")
    return value


def _parse(line: bytes) -> dict[str, Any] | BadExample:
    try:
        value = json.loads(line.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as problem:
        return BadExample(
            f"not valid UTF-8 (0x{problem.object[problem.start]:02x})",
            "Convert the file, for example with iconv -t UTF-8.",
        )
    except json.JSONDecodeError as problem:
        return BadExample(f"not valid JSON: {problem.msg} at character {problem.pos + 1}")
    except _KeyGivenTwice as problem:
        return BadExample(str(problem))
    except (ValueError, RecursionError) as problem:  # a number too long to convert, too deep a nesting
        return BadExample(f"not valid JSON: {problem}")
    if not isinstance(value, dict):
        return BadExample(f"not a JSON object but {json.dumps(value):.60}")
    return value
