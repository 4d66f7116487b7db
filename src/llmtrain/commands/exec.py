"""llmtrain exec: run a command in every pod of a run."""

import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import PodOption, RunArgument, connect_to_namespace
from llmtrain.commands.options import CURRENT, JsonOption, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import say
from llmtrain.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from llmtrain.operate.observed_run import ObservedRun


@with_option_groups
def command(
    run: RunArgument,
    words: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", show_default=False)] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Keep it running in the background; its log is on the runs volume.")
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="Stop the command that --detach started.")] = False,
    pod: PodOption = None,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Run a command in all pods of a run, or in the pods given by --pod, and print its output; each line starts with
    the pod's node rank. In pods of `launch --hold` it runs in /work with the PET_* variables of torchrun set, and
    Ctrl-C stops it everywhere. Exits with the exit code of the first pod that failed."""
    cluster, namespace = connect_to_namespace(place, run)
    if kill == bool(words) or (kill and detach):
        named = f"{run}{cluster.place(namespace)}"
        remedy = f"Example: llmtrain exec {named} -- torchrun train.py, or llmtrain exec {named} --kill"
        raise UsageError("Pass a command or --kill.", remedy=remedy)
    from llmtrain.operate.cluster_run import ClusterRun

    seen = ClusterRun.find(cluster, run, namespace).look(with_usage=False)
    if kill:
        _kill(seen, pod or [], json_)
    elif detach:
        _start(seen, words or [], pod or [], json_)
    else:
        _run(seen, words or [], pod or [], json_)


def _run(run: "ObservedRun", words: list[str], chosen: list[str], json_: bool) -> None:
    from llmtrain.kubernetes.exec import STDERR
    from llmtrain.operate.exec.run_in_pods import run_in_all

    lock = threading.Lock()

    def show_line(index: int, channel: int, line: str) -> None:
        # Escape sequences are kept: the command is the user's own.
        out = sys.stderr if json_ or channel == STDERR else sys.stdout  # stdout is for the JSON object
        with lock:
            print(f"[{index}] {line}", file=out, flush=True)

    try:
        exits = run_in_all(run, words, show_line, chosen)
    except KeyboardInterrupt:
        if run.record.task.mode != "hold":
            say("\nThe command may still be running: only pods of launch --hold stop it on Ctrl-C.", sys.stderr)
        raise
    for each in exits:
        if each.problem:
            say(f"[{each.index}] {each.problem}", sys.stderr)
        elif each.exit_code:
            say(f"[{each.index}] exited with code {each.exit_code}.", sys.stderr)
    if json_:
        nodes = [{"node": each.index, "pod": each.pod, "exit_code": each.exit_code} for each in exits]
        show(json_, {"run_id": run.run_id, "nodes": nodes}, "")
    for each in exits:
        code = ClusterError.exit_code if each.exit_code is None else each.exit_code
        if code:
            raise typer.Exit(code)


def _start(run: "ObservedRun", words: list[str], chosen: list[str], json_: bool) -> None:
    from llmtrain.core.text import plural
    from llmtrain.operate.exec.run_in_pods import start_in_all

    pods = start_in_all(run, words, chosen)
    text = (
        f"Started in {plural(len(pods), 'pod')}. Output: llmtrain logs {run.in_commands} -f (also on the runs volume). "
        f"Stop it: llmtrain exec {run.in_commands} --kill."
    )
    show(json_, {"run_id": run.run_id, "started": [pod.name for pod in pods]}, text)


def _kill(run: "ObservedRun", chosen: list[str], json_: bool) -> None:
    from llmtrain.operate.exec.run_in_pods import kill_in_all

    pods = kill_in_all(run, chosen)
    names = [pod.name for pod in pods]
    text = f"Stopped in {', '.join(names)}." if names else "No command was running."
    show(json_, {"run_id": run.run_id, "ended": names}, text)
