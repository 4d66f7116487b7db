"""What happens to records that cannot be used: an error that names the first, or they are left out and counted."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from llmtrain.core.logs import warn_once
from llmtrain.data.records.base import BadRecord, Record
from llmtrain.errors import DataError

Result = TypeVar("Result")


class UsableRecords:
    def __init__(self, on_bad: Literal["error", "skip"], field: str, noun: str) -> None:
        """`field`: the config field that chooses on_bad. `noun`: what a record becomes, such as `example`."""
        self._on_bad = on_bad
        self._field = field
        self._noun = noun
        self._warned: set[tuple[str, str]] = set()  # a file is read several times

    def convert(
        self, source: str, unit: str, records: Iterable[Record], convert: Callable[[dict[str, Any]], Result]
    ) -> Iterator[tuple[int, Result]]:
        """Number and result of each record that `convert` accepts; it raises BadRecord for others."""
        count = dropped = 0
        first = ""  # what is wrong with the first record that is dropped
        remedy: str | None = None
        for record in records:
            count += 1
            try:
                if isinstance(record.value, BadRecord):
                    raise record.value
                result = convert(record.value)
            except BadRecord as bad:
                place = f"{unit} {record.number}"
                if self._on_bad == "error":
                    fix = bad.remedy or f"Fix the {self._noun}."
                    raise DataError(
                        f"{source}, {place}: {bad.reason}.",
                        remedy=f"{fix} Set {self._field} to skip to drop such {self._noun}s.",
                    ) from None
                if not dropped:
                    first = f"{place}: {bad.reason}"
                    remedy = bad.remedy
                dropped += 1
                continue
            yield record.number, result
        if not count:
            raise DataError(f"{source} has no {self._noun}s.")
        if dropped == count:
            raise DataError(
                f"{source}: none of the {count:,} {self._noun}s can be used; the first is {first}.", remedy=remedy
            )
        if dropped and (source, first) not in self._warned:
            self._warned.add((source, first))
            were = "was" if dropped == 1 else "were"
            warn_once(
                "DATA", f"{dropped:,} of {count:,} {self._noun}s of {source} {were} dropped; the first is {first}"
            )


def text_of(value: object, what: str) -> str:
    """The value, checked to be text that can be tokenized."""
    if not isinstance(value, str):
        raise BadRecord(f"{what} must be text, got {value!r:.60}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecord(f"{what} contains an unpaired surrogate") from None
    return value


def check_no_nul(text: str) -> None:
    if "\0" in text:
        raise BadRecord("contains a NUL character, the byte tokenizer's end of text")


def field_names(record: dict[str, Any]) -> str:
    """`'input', 'output'`, for messages."""
    return ", ".join(f"{name!r:.60}" for name in sorted(record)) or "no fields"
