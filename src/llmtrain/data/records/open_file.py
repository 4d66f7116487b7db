"""Which format a file of records has."""

import json
from pathlib import Path

from llmtrain.data.records.base import BYTE_ORDER_MARK, RecordFile
from llmtrain.data.records.csv_rows import CsvRows
from llmtrain.data.records.json_array import JsonArray
from llmtrain.data.records.json_lines import JsonLines
from llmtrain.data.records.parquet_rows import ParquetRows
from llmtrain.errors import DataError

_TABLES = (".csv", ".tsv")
RECORD_SUFFIXES = (".json", ".jsonl", ".ndjson", *_TABLES, ".parquet")
FORMATS = "JSON lines, a JSON array, CSV, TSV or Parquet"
_PARQUET_MAGIC = b"PAR1"
_HEAD_BYTES = 1 << 20


def find_file(name: str, field: str) -> Path:
    """The file of this name. `field` is for messages."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(
            f"{field} must be a file ({FORMATS}), got the directory {name}.",
            remedy="Name a file in it. For a dataset directory, set data.dataset_name to it, and data.train_file and "
            "data.val_file to null.",
        )
    if not path.is_file():
        raise DataError(
            f"{field}: file {name} does not exist.",
            remedy=f"Relative paths start at the current directory, {Path.cwd()}.",
        )
    return path


def open_records(path: Path, name: str | None = None) -> RecordFile:
    """The file, by its content; what is CSV shows only in its name. `name`: as the user wrote it, for messages."""
    name = name or str(path)
    head = _head(path, name)
    if not head:
        raise DataError(f"{name} is empty.", remedy=f"It must contain records: {FORMATS}.")
    suffix = path.suffix.lower()
    if suffix == ".parquet" or head.startswith(_PARQUET_MAGIC):
        return ParquetRows(path, name)
    if suffix in _TABLES:
        return CsvRows(path, name)
    return JsonArray(path, name) if head.startswith(b"[") else JsonLines(path, name)


def has_records(path: Path) -> bool:
    """Whether the file has records and is not running text: by its name, or because its first line is a JSON object."""
    if path.suffix.lower() in RECORD_SUFFIXES:
        return True
    head = _head(path, str(path))
    return head.startswith(_PARQUET_MAGIC) or (head.startswith(b"{") and _is_object(head.splitlines()[0]))


def _head(path: Path, name: str) -> bytes:
    """The beginning of the file, without white space before it; empty if there is nothing else."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip()
            while not head and (block := file.read(_HEAD_BYTES)):
                head = block.lstrip()
            return head
    except OSError as problem:
        raise DataError(f"Cannot read {name}: {problem.strerror or problem}.") from None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
