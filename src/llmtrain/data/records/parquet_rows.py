"""Parquet, as the datasets library and most data tools write it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llmtrain.core.text import one_line
from llmtrain.data.records.base import Record, RecordFile
from llmtrain.errors import DataError

_ROWS_AT_ONCE = 256
"""Few, because a single text may have megabytes."""


class ParquetRows(RecordFile):
    unit = "row"

    def read(self, columns: Sequence[str] | None = None) -> Iterator[Record]:
        number = 0
        with self._opened() as file:
            wanted = None
            if columns is not None:
                wanted = [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted, use_threads=False):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, value)

    def count(self) -> int:
        with self._opened() as file:
            return int(file.metadata.num_rows)

    def columns(self) -> list[str]:
        with self._opened() as file:
            return list(file.schema_arrow.names)

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                yield file
        except (pyarrow.ArrowException, OSError, ValueError) as problem:
            raise DataError(f"{self.name} is not a readable Parquet file: {one_line(problem, 200)}.") from None
