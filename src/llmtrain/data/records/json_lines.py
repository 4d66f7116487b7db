"""JSON lines: one JSON object per line, strictly UTF-8."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from llmtrain.data.records.base import BadRecord, Record, RecordFile


class JsonLines(RecordFile):
    def read(self, columns: Sequence[str] | None = None) -> Iterator[Record]:  # noqa: ARG002 (a line is read whole)
        return (Record(number, _parse(line)) for number, line in self._filled_lines())

    def count(self) -> int:
        return sum(1 for _ in self._filled_lines())

    def _filled_lines(self) -> Iterator[tuple[int, bytes]]:
        for number, line in self.lines():
            if line.strip():
                yield number, line.strip()


class DuplicateKey(ValueError):
    pass


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict, as json makes it; raises on a duplicate key, of which json would silently drop one value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKey(f"duplicate key {next(key for key in keys if keys.count(key) > 1)!r:.60}")
    return value


def checked_object(value: Any) -> dict[str, Any] | BadRecord:
    if isinstance(value, dict):
        return value
    return BadRecord(f"must be a JSON object, got {json.dumps(value):.60}")


def _parse(line: bytes) -> dict[str, Any] | BadRecord:
    try:
        return checked_object(json.loads(line.decode(), object_pairs_hook=unique_keys))
    except UnicodeDecodeError as problem:
        return BadRecord(
            f"not valid UTF-8 (0x{problem.object[problem.start]:02x})",
            "Convert the file, for example with iconv -t UTF-8.",
        )
    except json.JSONDecodeError as problem:
        return BadRecord(f"not valid JSON: {problem.msg} at character {problem.pos + 1}")
    except DuplicateKey as problem:
        return BadRecord(str(problem))
    except (ValueError, RecursionError) as problem:  # a number with too many digits, nesting too deep
        return BadRecord(f"not valid JSON: {problem}")
