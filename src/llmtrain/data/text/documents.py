"""Text from files of records: each record is a document, and one column holds its text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.data.records.base import BadRecord, RecordFile
from llmtrain.data.records.open_file import has_records, open_records
from llmtrain.data.records.usable import UsableRecords, check_no_nul, field_names, text_of
from llmtrain.data.text import reader
from llmtrain.data.text.reader import read_chunks, split_document
from llmtrain.data.text_and_examples import TextChunk
from llmtrain.errors import DataError

_TEXT_COLUMNS = ("text", "content", "document", "body")
"""Names that datasets use for the column of text, in the order in which they are looked for."""


class DocumentReader:
    """Reads plain text files, and the documents of a column from files of records."""

    def __init__(
        self, column: str | None, records: UsableRecords, nul_ends_text: bool, field: str = "data.text_column"
    ) -> None:
        """Without a column, every file is plain text. `nul_ends_text`: for the byte tokenizer. `field`: what names the
        column, for messages."""
        self._column = column
        self._records = records
        self._nul_ends_text = nul_ends_text
        self._field = field

    def read(self, path: Path) -> Iterator[TextChunk]:
        if self._column is None or not has_records(path):
            yield from read_chunks(path)
        elif path.stat().st_size:  # an empty file has no documents, as with plain text
            for text in self._texts(open_records(path), self._column):
                yield from split_document(_parts(text))

    def size(self, path: Path) -> int:
        """Bytes of text in a file; of plain text also a byte order mark, which is not read."""
        if self._column is None or not has_records(path):
            return path.stat().st_size
        return sum(len(chunk.text.encode()) for chunk in self.read(path))

    def _texts(self, file: RecordFile, column: str) -> Iterator[str]:
        columns = file.columns()
        if columns is not None and column not in columns:
            raise DataError(
                f"{self._field}: {file.name} has no column '{column}'.",
                known=[f"{name:.60}" for name in columns],
                remedy=f"Set {self._field} to the column that holds the text.",
            )

        def text_in(record: dict[str, Any]) -> str:
            if column not in record:
                found = f"field '{column}' is missing; the record has {field_names(record)}"
                raise BadRecord(found, f"Set {self._field}, or fix the record.")
            text = text_of(record[column], f"column '{column}'")
            if self._nul_ends_text:
                check_no_nul(text)
            return text

        records = self._records.convert(file.name, file.unit, file.read([column]), text_in)
        return (text for _, text in records)


def find_text_column(file: RecordFile) -> str | None:
    """The column that holds the text: by its name, or because no other holds text. None if that is unclear."""
    columns: dict[str, None] = {}  # in order of appearance
    for record in file.sample():
        columns.update({name: None for name, value in record.items() if isinstance(value, str)})
    for name in _TEXT_COLUMNS:
        if name in columns:
            return name
    return next(iter(columns)) if len(columns) == 1 else None


def _parts(text: str) -> Iterator[str]:
    size = reader.BLOCK_BYTES
    return (text[start : start + size] for start in range(0, len(text), size))
