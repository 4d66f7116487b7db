"""Output while and after a run is watched, for launch and resume: they exit with the exit code of the run."""

import sys
from typing import TYPE_CHECKING

from llmtrain.commands.options import show
from llmtrain.core.terminal import say
from llmtrain.errors import UsageError
from llmtrain.runs.state import RunState

if TYPE_CHECKING:
    from llmtrain.operate.cluster_run import ClusterRun


def check_watching(detach: bool, recover_after: float | None) -> None:
    if detach and recover_after is not None:
        raise UsageError(
            "--recover-lost-nodes cannot be combined with --detach: it only works while the run is watched.",
            remedy="Omit one of them. `llmtrain guard install` recovers all runs of a namespace without watching.",
        )


def follow_run(run: "ClusterRun", *, detach: bool, recover_after: float | None, json_: bool) -> None:
    """Watch a run that was just launched."""
    run_id = run.record.run_id
    name = run.in_commands
    next_commands = (
        f"Watch it: llmtrain status {name} --watch. Logs: llmtrain logs {name}. Stop it: llmtrain stop {name}."
    )
    if detach:
        status = run.status(with_log=False, with_usage=False)
        show(json_, status.as_dict(), f"Run {run_id} launched. {next_commands}")
        return
    out = sys.stderr if json_ else sys.stdout  # stdout is for the JSON object
    try:
        status = run.follow_launch(out, is_terminal=out.isatty(), recover_after=recover_after)
    except KeyboardInterrupt:
        say(f"\nRun {run_id} keeps running. {next_commands}", sys.stderr)
        return
    if status.state == RunState.RUNNING:
        text = (
            f"The pods of run {run_id} are ready. Copy files: llmtrain push {name} FILE... Run a command: "
            f"llmtrain exec {name} -- torchrun FILE. Stop it: llmtrain stop {name}."
        )
    elif status.state == RunState.FINISHED:
        sentences = [f"Run {run_id} finished."]
        if run.record.kind.pods_idle_at_end:
            sentences.append("Its pods keep their resources until it is stopped.")
        if status.has_files:
            sentences.append(f"Download it: llmtrain fetch {name}.")
        text = " ".join([*sentences, f"Delete it: llmtrain delete {name}."])
    else:
        raise run.end_error(status)
    show(json_, status.as_dict(), text)
