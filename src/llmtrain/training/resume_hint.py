"""What an interrupted run tells its user, and the status it ends with."""

import os

from llmtrain.checkpoint.state import TrainState
from llmtrain.config.output import OutputSection
from llmtrain.core.env import LAUNCH
from llmtrain.core.progress import is_live
from llmtrain.errors import Interrupted, PeerLost, Superseded
from llmtrain.runs.generations import end_generation
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Tracker
from llmtrain.training.context import RunContext


def interrupted_status(error: Interrupted) -> EndStatus:
    if isinstance(error, PeerLost):
        return EndStatus.FAILED
    if isinstance(error, Superseded):
        return EndStatus.SUPERSEDED
    return EndStatus.STOPPED


def prepare_interrupt(context: RunContext, tracker: Tracker, state: TrainState) -> None:
    """What a signal shows and, if it is a second Ctrl-C, leaves behind."""
    stop = context.stop
    stop.remedy = _resume_hint(context)
    if is_live():
        stop.show = tracker.activity
    if context.world.is_first:
        stop.before_leaving = lambda: end_generation(context.run, context.generation, EndStatus.STOPPED, state.step)


def _resume_hint(context: RunContext) -> str:
    run = context.run
    if LAUNCH in os.environ:
        return f"Resume with: llmtrain resume {run.run_id}"
    is_default_root = context.config.output.root_dir == OutputSection().root_dir
    name = run.run_id if is_default_root else run.shown()
    return f"Resume with: llmtrain train --resume {name}"


def add_resume_hint(context: RunContext, error: Interrupted, step: int) -> None:
    run = context.run
    if interrupted_status(error) == EndStatus.STOPPED:
        error.remedy = _resume_hint(context)
    error.details = {**error.details, "run_id": run.run_id, "run_dir": str(run.shown()), "steps": step}
