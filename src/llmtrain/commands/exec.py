"""llmtrain exec: run a command in every pod of a run."""

import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    PodOption,
    RunArgument,
    connect,
)
from llmtrain.commands.options import JsonOption, show
from llmtrain.errors import ClusterError, UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.record import Record


def command(
    run: RunArgument,
    words: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", show_default=False)] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Keep it running in the background; its log is on the runs volume.")
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="Stop the command that --detach started.")] = False,
    pod: PodOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Run a command in all pods of a run, or in the pods given by --pod, and print its output; each line starts with
    the pod's node rank. In pods of `launch --hold` it runs in /work with the PET_* variables of torchrun set, and
    Ctrl-C stops it everywhere. Exits with the exit code of the first pod that failed."""
    from llmtrain.launch.record import find_record

    cluster = connect(kubeconfig, context, run)
    if kill == bool(words) or (kill and detach):
        named = f"{run}{cluster.place(namespace or cluster.namespace)}"
        remedy = f"Example: llmtrain exec {named} -- torchrun train.py, or llmtrain exec {named} --kill"
        raise UsageError("Pass a command or --kill.", remedy=remedy)
    record = find_record(cluster, run, namespace or cluster.namespace)
    if kill:
        _kill(cluster, record, pod or [], json_)
    elif detach:
        _start(cluster, record, words or [], pod or [], json_)
    else:
        _run(cluster, record, words or [], pod or [], json_)


def _run(cluster: "Cluster", record: "Record", words: list[str], chosen: list[str], json_: bool) -> None:
    from llmtrain.kubernetes.exec import STDERR
    from llmtrain.operate.exec.run_in_pods import run_in_all

    lock = threading.Lock()

    def show_line(index: int, channel: int, line: str) -> None:
        # Escape sequences are kept: the command is the user's own.
        with lock:  # stdout is for the JSON object
            print(f"[{index}] {line}", file=sys.stderr if json_ or channel == STDERR else sys.stdout, flush=True)

    try:
        exits = run_in_all(cluster, record, words, show_line, chosen)
    except KeyboardInterrupt:
        if record.work.mode != "hold":
            say("\nThe command may still be running: only pods of launch --hold stop it on Ctrl-C.", sys.stderr)
        raise
    for each in exits:
        if each.problem:
            say(f"[{each.index}] {each.problem}", sys.stderr)
        elif each.exit_code:
            say(f"[{each.index}] exited with code {each.exit_code}.", sys.stderr)
    nodes = [{"node": each.index, "pod": each.pod, "exit_code": each.exit_code} for each in exits]
    if json_:
        show(json_, {"run_id": record.run_id, "nodes": nodes}, "")
    codes = [ClusterError.exit_code if each.exit_code is None else each.exit_code for each in exits]
    if failed := [code for code in codes if code]:
        raise typer.Exit(failed[0])


def _start(cluster: "Cluster", record: "Record", words: list[str], chosen: list[str], json_: bool) -> None:
    from llmtrain.operate.exec.run_in_pods import start_in_all
    from llmtrain.text import plural

    pods = start_in_all(cluster, record, words, chosen)
    run = f"{record.run_id}{cluster.place(record.namespace)}"
    text = (
        f"Started in {plural(len(pods), 'pod')}. Output: llmtrain logs {run} -f (also on the runs volume). "
        f"Stop it: llmtrain exec {run} --kill."
    )
    show(json_, {"run_id": record.run_id, "started": [pod.name for pod in pods]}, text)


def _kill(cluster: "Cluster", record: "Record", chosen: list[str], json_: bool) -> None:
    from llmtrain.operate.exec.run_in_pods import kill_in_all

    pods = kill_in_all(cluster, record, chosen)
    text = f"Stopped in {', '.join(pod.name for pod in pods)}." if pods else "No command was running."
    show(json_, {"run_id": record.run_id, "ended": [pod.name for pod in pods]}, text)
