"""Weights & Biases (extra `wandb`), in a separate thread, as MLflow.

The id of the W&B run is stored in the run directory, so that a resumed run continues in it. It first sends the rows of
metrics.jsonl that the server did not receive before the interruption. Steps after the newest checkpoint are trained
twice: W&B keeps the first values of a step. Without a server (tracking.wandb.offline) every start writes a complete
record to the directory `wandb` of the run.
"""

import importlib.util
import os
import secrets
from pathlib import Path
from typing import Any

from llmtrain.core.files import read_json, write_json
from llmtrain.core.install import install_command
from llmtrain.core.logs import log
from llmtrain.core.redact import redact_values
from llmtrain.errors import ExitCode, UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.state import EndStatus
from llmtrain.runs.view import RunView
from llmtrain.tracking.background import FLUSH_SEC, BackgroundTracker
from llmtrain.tracking.base import Metrics, TrackedRun
from llmtrain.tracking.rows import read_rows

INIT_SEC = 60.0
# By default W&B prints, captures what the program prints, asks for an API key, and reports its own errors to a server.
SETTINGS = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_ERROR_REPORTING": "false"}
EXIT_CODES: dict[EndStatus, int] = {
    EndStatus.FINISHED: ExitCode.FINISHED,
    EndStatus.STOPPED: ExitCode.INTERRUPTED,
    EndStatus.FAILED: ExitCode.PROBLEM,
    EndStatus.SUPERSEDED: ExitCode.INTERRUPTED,
}
"""W&B shows a run with another exit code than 0 as failed; it has no status for a run that was interrupted."""


class WandbTracker(BackgroundTracker):
    title = "W&B"

    def __init__(self, run: TrackedRun) -> None:
        check_installed()
        self._run = run
        self._earlier = read_rows(RunView(run.directory)) if run.resumed_from else []
        self._wandb_run: Any = None
        super().__init__(self._open)

    def log(self, step: int, metrics: Metrics) -> None:
        self._later(lambda: self._wandb_run.log(metrics, step=step))

    def samples(self, step: int, path: Path) -> None:  # noqa: ARG002
        self._later(lambda: self._save(path))

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self._finish(status, lambda: self._close(status))

    def _open(self) -> None:
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import wandb

        run = self._run
        config = self._run.config.tracking.wandb
        is_offline = config.offline or os.environ.get("WANDB_MODE") in ("offline", "dryrun")
        self._wandb_run = wandb.init(
            project=config.project,
            entity=config.entity,
            name=config.run_name or run.directory.run_id,
            group=run.config.tracking.group,
            id=wandb_id(run.directory),
            resume="allow",
            dir=str(run.directory.path),
            mode="offline" if is_offline else None,
            config=redact_values(run.config.as_dict()) | {"facts": run.facts},
            reinit="create_new",
            settings=wandb.Settings(
                disable_git=True,
                save_code=False,
                init_timeout=INIT_SEC,
                finish_timeout=FLUSH_SEC,
            ),
        )
        where = (
            f"offline, in {run.directory.shown(run.directory.path / 'wandb')}" if is_offline else self._wandb_run.url
        )
        log("TRAIN", f"W&B run {where}", fields={"wandb_run_id": self._wandb_run.id})
        for step, metrics, _ in self._earlier:
            if step >= self._wandb_run.starting_step:
                self._wandb_run.log(metrics, step=step)

    def _close(self, status: EndStatus) -> None:
        report = self._run.directory.report
        if status == EndStatus.FINISHED and report.is_file():
            self._save(report)
        self._wandb_run.finish(exit_code=EXIT_CODES[status])

    def _save(self, path: Path) -> None:
        self._wandb_run.save(str(path), base_path=str(self._run.directory.path), policy="now")


def wandb_id(run: RunDirectory) -> str:
    """The id of the W&B run. Random characters distinguish it from a deleted run of the same name."""
    record = read_json(run.wandb)
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        record = {"id": f"{run.run_id}-{secrets.token_hex(3)}"}
        write_json(run.wandb, record)
    return str(record["id"])


def check_installed() -> None:
    if importlib.util.find_spec("wandb") is None:
        raise UsageError(
            "tracking.wandb.enabled is true, but wandb is not installed.",
            remedy=f"{install_command('wandb')}, or set tracking.wandb.enabled to false.",
        )
