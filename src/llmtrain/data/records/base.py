"""A file of records: JSON objects, or the rows of a table.

    RecordFile      read() -> Record, ...
    ├── JsonLines   one JSON object per line
    ├── JsonArray   one array of JSON objects
    ├── CsvRows     comma- or tab-separated values; the first line names the columns
    └── ParquetRows

Every format is read in parts, so that memory does not grow with the file. open_records chooses it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from llmtrain.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SAMPLE = 100
"""Records that are looked at to find out what a file contains."""


class BadRecord(Exception):
    """Why a record cannot be used. The reader, which knows its place, reports it or skips the record."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


class Record(NamedTuple):
    number: int
    """Its line, or in a file without lines its position, from 1."""
    value: dict[str, Any] | BadRecord
    """The object, or why there is none."""


class RecordFile(ABC):
    unit: ClassVar[str] = "line"
    """What the numbers of records count, for messages."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        """The file as the user named it, for messages."""

    @abstractmethod
    def read(self, columns: Sequence[str] | None = None) -> Iterator[Record]:
        """The records in order. `columns`: those that are needed; a table reads no others."""

    def count(self) -> int:
        return sum(1 for _ in self.read())

    def columns(self) -> list[str] | None:
        """The columns of a table; None if each record has its own fields."""
        return None

    def sample(self) -> list[dict[str, Any]]:
        """The first records, without those that cannot be read."""
        return [record.value for record in islice(self.read(), SAMPLE) if isinstance(record.value, dict)]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines of a text file with their numbers, without a byte order mark."""
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        except OSError as problem:
            raise DataError(f"Cannot read {self.name}: {problem.strerror or problem}.") from None
