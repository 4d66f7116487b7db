"""Watching a run after launch and resume: exits with the exit code of the run."""

import sys
from typing import TYPE_CHECKING

from llmtrain.commands.options import show
from llmtrain.errors import Interrupted, LlmtrainError, UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.record import Record
    from llmtrain.operate.status.run_status import RunStatus


MODES_WITH_FILES = ("train", "command", "hold")  # the other modes write nothing to the volume


def check_watching(detach: bool, recover_after: float | None) -> None:
    if detach and recover_after is not None:
        raise UsageError(
            "--recover-lost-nodes cannot be combined with --detach: it only works while the run is watched.",
            remedy="Omit one of them. `llmtrain guard install` recovers all runs of a namespace without watching.",
        )


def follow_run(
    cluster: "Cluster", run_id: str, namespace: str, *, detach: bool, recover_after: float | None, json_: bool
) -> None:
    """Watch a run that was just launched. If it cannot start, the first launch of a run is rolled back."""
    from llmtrain.launch.plan import config_map_name
    from llmtrain.launch.record import find_record
    from llmtrain.operate.status.run_status import run_status
    from llmtrain.operate.status.watch import follow

    record = find_record(cluster, run_id, namespace)
    place = cluster.place(record.namespace)
    if detach:
        status = run_status(cluster, record, with_log=False, with_usage=False)
        show(json_, status.as_dict(), f"Run {run_id} launched. {_next_commands(cluster, record)}")
        return

    def roll_back(error: UsageError) -> None:
        if record.number == 1:
            from llmtrain.launch import lifecycle

            try:
                kept = lifecycle.take_back(cluster, record)
                after = (
                    f"The launch was rolled back; {', '.join(kept)} was kept."
                    if kept
                    else "The launch was rolled back."
                )
            except LlmtrainError as problem:
                after = f"The launch was only partly rolled back ({problem.what}): run llmtrain delete {run_id}{place}."
            error.remedy = f"{error.remedy} {after}"
        raise error

    out = sys.stderr if json_ else sys.stdout
    try:
        status = follow(
            cluster,
            record,
            is_terminal=out.isatty(),
            out=out,
            on_never_started=roll_back,
            recover_after=recover_after,
            until_running=record.work.mode == "hold",
        )
    except KeyboardInterrupt:
        say(f"\nRun {run_id} keeps running. {_next_commands(cluster, record)}", sys.stderr)
        return
    if status.state == "running":
        show(json_, status.as_dict(), f"The pods of run {run_id} are ready. {_hold_commands(run_id, place)}")
        return
    is_deleted = cluster.get("v1", "ConfigMap", config_map_name(run_id), namespace) is None
    exit_as(status, json_, place, is_deleted)


def exit_as(status: "RunStatus", json_: bool, place: str, is_deleted: bool) -> None:
    """Show how the run ended, and raise the error whose exit code is that of the run. `is_deleted`: its record is
    gone."""
    run = f"{status.run_id}{place}"
    if status.state == "finished":
        holding = " Its pods keep their resources until it is stopped." if status.kind == "stateful_set" else ""
        fetch = f"Download it: llmtrain fetch {run}. " if status.mode in MODES_WITH_FILES else ""
        show(
            json_, status.as_dict(), f"Run {status.run_id} finished.{holding} {fetch}Delete it: llmtrain delete {run}."
        )
        return
    why = f": {status.why_short}" if status.why_short else ""
    if status.state == "failed":
        error = LlmtrainError(
            f"Run {status.run_id} failed{why}.",
            remedy=f"Diagnose it: llmtrain why {run}. Logs: llmtrain logs {run}.",
        )
        error.exit_code = status.exit_code or LlmtrainError.exit_code
    elif is_deleted:
        error = Interrupted(f"Run {status.run_id} was deleted while it was being watched.")
    else:
        remedy = f"Resume it: llmtrain resume {run}."
        error = Interrupted(f"Run {status.run_id} is {status.state}{why}.", remedy=remedy)
    error.details["status"] = status.as_dict()
    raise error


def _hold_commands(run_id: str, place: str) -> str:
    return (
        f"Copy files: llmtrain push {run_id}{place} FILE... Run a command: "
        f"llmtrain exec {run_id}{place} -- torchrun FILE. Stop it: llmtrain stop {run_id}{place}."
    )


def _next_commands(cluster: "Cluster", record: "Record") -> str:
    run = f"{record.run_id}{cluster.place(record.namespace)}"
    return f"Watch it: llmtrain status {run} --watch. Logs: llmtrain logs {run}. Stop it: llmtrain stop {run}."
