"""What launch and resume do once the job is made: watch it to its end, and end as it did."""

import sys
from typing import TYPE_CHECKING

from llmtrain.commands.options import show
from llmtrain.errors import Interrupted, LlmtrainError, UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.record import Record
    from llmtrain.operate.status.run_status import RunStatus


HAVE_FILES = ("train", "command", "hold")  # the others leave nothing on the volume


def check_watching(detach: bool, recover_after: float | None) -> None:
    if detach and recover_after is not None:
        raise UsageError(
            "--recover-lost-nodes acts while the run is watched, and --detach does not watch it.",
            remedy="Leave one of them out; `llmtrain guard install` watches a whole namespace from inside.",
        )


def follow_run(
    cluster: "Cluster", run_id: str, namespace: str, *, detach: bool, recover_after: float | None, json_: bool
) -> None:
    """Watch a run that was just launched. A launch that cannot start is taken back if it was the run's first."""
    from llmtrain.launch.plan import config_map_name
    from llmtrain.launch.record import find_record
    from llmtrain.operate.status.run_status import run_status
    from llmtrain.operate.status.watch import follow

    record = find_record(cluster, run_id, namespace)
    place = cluster.place(record.namespace)
    if detach:
        status = run_status(cluster, record, with_log=False, with_usage=False)
        show(json_, status.as_dict(), f"Run {run_id} is launched. {_hints(cluster, record)}")
        return

    def take_back(error: UsageError) -> None:
        if record.number == 1:
            from llmtrain.launch import lifecycle as apply

            try:
                kept = apply.take_back(cluster, record)
                after = f"Only {', '.join(kept)} stays." if kept else "Nothing was left on the cluster."
            except LlmtrainError as problem:
                after = f"Not all could be taken back ({problem.what}): llmtrain delete {run_id}{place} does."
            error.remedy = f"{error.remedy} {after}"
        raise error

    out = sys.stderr if json_ else sys.stdout
    try:
        status = follow(
            cluster,
            record,
            is_terminal=out.isatty(),
            out=out,
            on_never_started=take_back,
            recover_after=recover_after,
            until_running=record.work.mode == "hold",
        )
    except KeyboardInterrupt:
        say(f"\nRun {run_id} goes on. {_hints(cluster, record)}", sys.stderr)
        return
    if status.state == "running":
        show(json_, status.as_dict(), f"The pods of run {run_id} wait. {_hands(run_id, place)}")
        return
    is_forgotten = cluster.get("v1", "ConfigMap", config_map_name(run_id), namespace) is None
    end_as(status, json_, place, is_forgotten)


def end_as(status: "RunStatus", json_: bool, place: str, is_forgotten: bool) -> None:
    """Show how a run that was watched has ended, and end with its exit code. `is_forgotten`: the cluster has no record
    of it any more."""
    run = f"{status.run_id}{place}"
    if status.state == "finished":
        holding = " Its pods hold their resources until it is stopped." if status.kind == "stateful_set" else ""
        fetch = f"Bring it here: llmtrain fetch {run}. " if status.mode in HAVE_FILES else ""
        next_ = f"{fetch}Remove it: llmtrain delete {run}."
        show(json_, status.as_dict(), f"Run {status.run_id} is finished.{holding} {next_}")
        return
    why = f": {status.why_short}" if status.why_short else ""
    if status.state == "failed":
        error = LlmtrainError(
            f"Run {status.run_id} failed{why}.",
            remedy=f"llmtrain why {run} names the cause; llmtrain logs {run} shows what it said.",
        )
        error.exit_code = status.exit_code or LlmtrainError.exit_code
    elif is_forgotten:
        error = Interrupted(f"Run {status.run_id} was deleted while it was watched.")
    else:
        remedy = f"llmtrain resume {run} goes on with it."
        error = Interrupted(f"Run {status.run_id} is {status.state}{why}.", remedy=remedy)
    error.details["status"] = status.as_dict()
    raise error


def check_ended(cluster: "Cluster", record: "Record") -> None:
    """A run that is still going cannot be launched again."""
    from llmtrain.operate.status.run_status import run_status

    status = run_status(cluster, record, with_usage=False)
    if not status.has_ended:
        run = f"{record.run_id}{cluster.place(record.namespace)}"
        raise UsageError(
            f"Run '{record.run_id}' is still going ({status.state}).",
            remedy=f"Watch it (llmtrain status {run} --watch), or stop it first (llmtrain stop {run}).",
        )


def _hands(run_id: str, place: str) -> str:
    return (
        f"Bring files: llmtrain push {run_id}{place} FILE... Run: llmtrain exec {run_id}{place} -- torchrun FILE. "
        f"End it: llmtrain stop {run_id}{place}."
    )


def _hints(cluster: "Cluster", record: "Record") -> str:
    """The next commands, as they must be typed."""
    run = f"{record.run_id}{cluster.place(record.namespace)}"
    return f"Watch it: llmtrain status {run} --watch. Its log: llmtrain logs {run}. End it: llmtrain stop {run}."
