"""Where runs are trained: the interface of the driver to processes of this machine (local.py) and to a cluster
(cluster.py)."""

from pathlib import Path
from typing import Any, Protocol

from llmtrain.sweep.jobs import Job


class Workers(Protocol):
    def start(self, job: Job, config: Path) -> None:
        """Start or resume a run. One that is still running, because an earlier driver was killed, is taken over."""

    def ended(self) -> list[Job]:
        """The runs that have ended since the last call. Does not wait."""

    def error(self, job: Job) -> dict[str, Any]:
        """LlmtrainError.as_dict of what ended the run; empty if it reported none."""

    def stop(self, job: Job) -> None:
        """Ask a run to save and end; `ended` returns it later."""

    def end_all(self) -> str:
        """The driver ends: end the runs that end with it. Returns what became of them, for a message."""

    @property
    def poll_seconds(self) -> float:
        """How often to call `ended`."""
