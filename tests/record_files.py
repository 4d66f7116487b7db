"""Files of records for tests, in every format that is read."""

import csv
import io
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def write_rows(path: Path, rows: Rows) -> Path:
    """The rows in the format that the name of the file says."""
    if path.suffix == ".parquet":
        return write_parquet(path, **{name: [row.get(name) for row in rows] for name in rows[0]})
    if path.suffix == ".jsonl":
        content = "".join(json.dumps(row) + "\n" for row in rows)
    elif path.suffix == ".json":
        content = json.dumps(rows, indent=1)
    else:
        content = as_csv(rows, {".csv": ",", ".tsv": "\t"}[path.suffix])
    path.write_bytes(content.encode())
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def as_csv(rows: Rows, delimiter: str) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
