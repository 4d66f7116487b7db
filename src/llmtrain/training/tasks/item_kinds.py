"""The two kinds of items in task files, and the metrics of each. Needs no torch."""

from pathlib import Path
from typing import Any, Literal

from llmtrain.config.task_specs import TaskSpec
from llmtrain.data.records.open_file import open_records
from llmtrain.errors import DataError

Kind = Literal["choices", "answers"]
METRICS: dict[Kind, tuple[str, ...]] = {"choices": ("acc", "acc_norm"), "answers": ("exact_match", "contains")}
SHAPES = '{"question", "choices", "answer"} or {"prompt", "answer"}'
BUNDLED_DIR = Path(__file__).with_name("bundled")
_FIELDS: dict[Kind, set[str]] = {"choices": {"question", "choices", "answer"}, "answers": {"prompt", "answer"}}


def kind_of(value: dict[str, Any], place: str) -> Kind:
    for kind, fields in _FIELDS.items():
        if fields <= value.keys():
            return kind
    raise DataError(f"{place}: an item must have the fields {SHAPES}, got {', '.join(sorted(value)) or 'none'}.")


def file_of(spec: TaskSpec) -> Path:
    """The file of a task that is not a stock task."""
    assert not spec.is_stock
    return spec.file or BUNDLED_DIR / f"{spec.name}.jsonl"


def file_metrics(spec: TaskSpec) -> tuple[str, ...] | None:
    """The metrics of a task in a file, by its first item; None if there is no such file on this machine."""
    path = file_of(spec)
    if not path.is_file():
        return None
    for record in open_records(path).read():
        if isinstance(record.value, dict):
            return METRICS[kind_of(record.value, f"{path}:{record.number}")]
        return None  # training names the problem
    return None
