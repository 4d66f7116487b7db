"""Reading JSON lines files, strictly UTF-8, one line at a time."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.data.types import BadExample
from llmtrain.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    number: int
    value: dict[str, Any] | BadExample
    """The JSON object of the line, or why there is none."""


def find_file(name: str, field: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(
            f"{field} must be a JSON lines file, got the directory {name}.",
            remedy="Name a file in it. For a dataset directory, set data.dataset_name to it, and data.train_file and "
            "data.val_file to null.",
        )
    if not path.is_file():
        raise DataError(
            f"{field}: file {name} does not exist.", remedy="Relative paths start at the current working directory."
        )
    return path


def read_json_lines(path: Path, name: str) -> Iterator[Line]:
    """The lines that are not blank. `name` is the file name for messages, as the user wrote it."""
    lines = _lines(path, name)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{name} is empty.", remedy="It must contain one JSON object per line.")
    if first[1].startswith(b"["):
        raise DataError(
            f"{name} is a JSON array; it must contain one JSON object per line.",
            remedy=f"Convert it: jq -c '.[]' {name} > examples.jsonl",
        )
    return (Line(number, _parse(line)) for number, line in chain([first], lines))


def count_lines(path: Path, name: str) -> int:
    return sum(1 for _ in _lines(path, name))


def _lines(path: Path, name: str) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                content = line.removeprefix(_BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
                if content:
                    yield number, content
    except OSError as problem:
        raise DataError(f"Cannot read {name}: {problem.strerror or problem}.") from None


class _DuplicateKey(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict, as json makes it; raises on a duplicate key, of which json would silently drop one value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKey(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r:.60}")
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
    except _DuplicateKey as problem:
        return BadExample(str(problem))
    except (ValueError, RecursionError) as problem:  # a number with too many digits, nesting too deep
        return BadExample(f"not valid JSON: {problem}")
    if not isinstance(value, dict):
        return BadExample(f"must be a JSON object, got {json.dumps(value):.60}")
    return value
