"""The tasks that `--tasks` and trainer.eval_tasks name: those of lm_eval, those that llmtrain brings, files of items.

`hellaswag`, `arc_easy:5` (with five examples before each question), `grammar`, `my.jsonl`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UsageError

BUNDLED = ("arithmetic", "grammar", "spelling")
"""Small tasks in training/tasks/bundled/: they need neither a download nor lm_eval."""
FILE_SUFFIXES = (".json", ".jsonl", ".ndjson")
_SPEC = re.compile(r"(?P<name>.+?)(?::(?P<few_shot>\d{1,3}))?")
_STOCK_NAME = re.compile(r"\w[\w.+-]*")


@dataclass(frozen=True)
class TaskSpec:
    name: str
    few_shot: int | None = None
    """Examples before each question; None: as many as the task itself says."""
    file: Path | None = None

    @property
    def is_stock(self) -> bool:
        """Whether it is a task of lm_eval."""
        return self.file is None and self.name not in BUNDLED


def parse_tasks(texts: Sequence[str], field: str) -> list[TaskSpec]:
    """The tasks that comma-separated names stand for. `field` is for messages."""
    words = [word.strip() for text in texts for word in text.split(",")]
    specs = [_parse(word, field) for word in words if word]
    if not specs:
        raise UsageError(f"{field} names no task.", remedy=f"Such as hellaswag, {BUNDLED[0]} or my.jsonl.")
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{field} names the task '{name}' twice.", remedy="Scores are recorded by name.")
    return specs


def _parse(word: str, field: str) -> TaskSpec:
    match = _SPEC.fullmatch(word)
    assert match is not None
    name = match["name"]
    few_shot = None if match["few_shot"] is None else int(match["few_shot"])
    if name.lower().endswith(FILE_SUFFIXES) or "/" in name:
        file = Path(name).expanduser()
        return TaskSpec(re.sub(r"[^\w.-]+", "-", file.stem), few_shot, file)
    if not _STOCK_NAME.fullmatch(name):
        raise UsageError(
            f"{field}: '{word}' is not the name of a task.", remedy="Write NAME, NAME:EXAMPLES (at most 999) or a file."
        )
    return TaskSpec(name, few_shot)
