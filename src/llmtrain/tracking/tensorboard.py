"""TensorBoard event files in the run directory (extra `tensorboard`)."""

import importlib.util
from typing import Any

from llmtrain.core.install import install_command
from llmtrain.errors import UsageError
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Metrics, TrackedRun, Tracker


class TensorboardTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        check_installed()
        from torch.utils.tensorboard.writer import SummaryWriter

        # Steps after the checkpoint are repeated: purge_step hides their earlier values.
        self._writer: Any = SummaryWriter(run.directory.tensorboard, purge_step=run.resumed_from + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self._writer.close()


def check_installed() -> None:
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "tracking.tensorboard.enabled is true, but tensorboard is not installed.",
            remedy=f"{install_command('tensorboard')}, or set tracking.tensorboard.enabled to false.",
        )
