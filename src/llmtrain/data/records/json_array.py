"""A JSON array of objects, read element by element."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llmtrain.data.records.base import BadRecord, Record, RecordFile
from llmtrain.data.records.json_lines import DuplicateKey, checked_object, unique_keys
from llmtrain.data.text.reader import read_blocks
from llmtrain.errors import DataError

_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_WORD = 16
"""More characters than a literal or an escape has: an error further from the end is not due to a missing rest."""
_STRICT = json.JSONDecoder(object_pairs_hook=unique_keys)
_PLAIN = json.JSONDecoder()


class JsonArray(RecordFile):
    unit = "record"

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Record]:  # noqa: ARG002 (all text is parsed)
        text = _Text(read_blocks(self.path))
        if text.next_character() != "[":
            raise self._invalid("it must begin with '['")
        text.position += 1
        number = 0
        if text.next_character() == "]":
            text.position += 1
        else:
            separator = ","
            while separator == ",":
                number += 1
                yield Record(number, self._element(text, number))
                separator = text.next_character()
                text.position += 1
            if separator != "]":
                raise self._invalid(f"record {number} is followed by {separator!r}" if separator else "']' is missing")
        if rest := text.next_character():
            raise self._invalid(f"{rest!r} follows the end of the array")

    def _element(self, text: "_Text", number: int) -> dict[str, Any] | BadRecord:
        text.next_character()  # skips white space
        try:
            return checked_object(text.decode(_STRICT))
        except DuplicateKey as problem:
            text.decode(_PLAIN)  # moves to the end of the element
            return BadRecord(str(problem))
        except json.JSONDecodeError as problem:
            raise self._invalid(f"record {number}: {problem.msg}") from None
        except (ValueError, RecursionError) as problem:  # a number with too many digits, nesting too deep
            raise self._invalid(f"record {number}: {problem}") from None

    def _invalid(self, why: str) -> DataError:
        return DataError(f"{self.name} is not a valid JSON array: {why}.", remedy="Fix the file.")


class _Text:
    """A window on a text that is read in blocks."""

    def __init__(self, blocks: Iterator[str]) -> None:
        self._blocks = blocks
        self._window = ""
        self.position = 0

    def next_character(self) -> str:
        """The next character that is not white space, which stays the next one; empty at the end."""
        while True:
            space = _SPACE.match(self._window, self.position)
            assert space
            self.position = space.end()
            if self.position < len(self._window):
                return self._window[self.position]
            if not self._extend():
                return ""

    def decode(self, decoder: json.JSONDecoder) -> Any:
        """The JSON value at the position, which moves behind it."""
        while True:
            try:
                value, end = decoder.raw_decode(self._window, self.position)
            except json.JSONDecodeError as problem:
                is_cut = problem.msg.startswith("Unterminated") or len(self._window) - problem.pos < _LONGEST_WORD
                if not (is_cut and self._extend()):
                    raise
                continue
            if end == len(self._window) and self._extend():
                continue  # a number may continue
            self.position = end
            return value

    def _extend(self) -> bool:
        """Drop what has been read, and read at least as much as is left: a long value is parsed few times."""
        self._window = self._window[self.position :]
        self.position = 0
        parts = [self._window]
        missing = max(1, len(self._window))
        for block in self._blocks:
            parts.append(block)
            missing -= len(block)
            if missing <= 0:
                break
        self._window = "".join(parts)
        return len(parts) > 1
