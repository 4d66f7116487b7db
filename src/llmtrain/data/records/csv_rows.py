"""CSV and TSV: the first line names the columns, and every value is text."""

import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llmtrain.core.text import plural
from llmtrain.data.records.base import BadRecord, Record, RecordFile
from llmtrain.errors import DataError

_HEADER_REMEDY = "The first line must name the columns."


class CsvRows(RecordFile):
    def read(self, columns: Sequence[str] | None = None) -> Iterator[Record]:  # noqa: ARG002 (a line is read whole)
        names: list[str] | None = None
        for number, values in self._rows():
            if names is None:
                names = self._checked_header(values)
            elif len(values) != len(names):
                found = f"has {plural(len(values), 'value')}, but the first line names {plural(len(names), 'column')}"
                yield Record(number, BadRecord(found, "Put quotes around values that contain the separator."))
            else:
                yield Record(number, dict(zip(names, values, strict=True)))

    def columns(self) -> list[str]:
        return next((self._checked_header(values) for _, values in self._rows()), [])

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """The rows, each with the line it begins at; blank lines are skipped."""
        # Not strict, the csv module takes the rest of the file as one value if a quote is missing.
        with _no_size_limit():
            reader = csv.reader(self._decoded_lines(), delimiter=self._delimiter(), strict=True)
            number = 1
            try:
                for values in reader:
                    if values:
                        yield number, values
                    number = reader.line_num + 1
            except csv.Error as problem:
                raise DataError(f"{self.name}, line {number}: not valid CSV: {problem}.", remedy="Fix it.") from None

    def _decoded_lines(self) -> Iterator[str]:
        for number, line in self.lines():
            try:
                text = line.decode()
            except UnicodeDecodeError as problem:
                raise DataError(
                    f"{self.name}, line {number}: not valid UTF-8 (0x{problem.object[problem.start]:02x}).",
                    remedy="Convert the file, for example with iconv -t UTF-8.",
                ) from None
            if "\0" in text:
                raise DataError(
                    f"{self.name}, line {number}: NUL character.",
                    remedy="Convert a UTF-16 file with iconv -f UTF-16 -t UTF-8; else remove it with tr -d '\\0'.",
                )
            yield text

    def _delimiter(self) -> str:
        """Spreadsheets of many countries write semicolons, because their decimal separator is the comma."""
        if self.path.suffix.lower() == ".tsv":
            return "\t"
        header = next(self._decoded_lines(), "")
        return next((delimiter for delimiter in ",;\t" if delimiter in header), ",")

    def _checked_header(self, names: list[str]) -> list[str]:
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{self.name}: two columns have the name {name!r:.60}.", remedy=_HEADER_REMEDY)
        return names


@contextmanager
def _no_size_limit() -> Iterator[None]:
    """The csv module refuses values of more than 128 KiB, for the whole process."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
