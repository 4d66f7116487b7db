"""llmtrain exec: a command in every pod of a run."""

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
    words: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND ...", show_default=False)] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Let it run on; its log is kept on the runs volume.")
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="End what --detach started.")] = False,
    pod: PodOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Run a command in all pods of a run, or those given by --pod, and show what they say, each line behind the number
    of its node. In pods that are held (launch --hold) it runs in /work, torchrun's variables say which node it is on,
    and Ctrl-C ends it everywhere. The exit code is that of the first node whose command failed."""
    from llmtrain.launch.record import find_record

    cluster = connect(kubeconfig, context)
    if kill == bool(words) or (kill and detach):
        named = f"{run}{cluster.place(namespace or cluster.namespace)}"
        remedy = f"llmtrain exec {named} -- torchrun train.py; llmtrain exec {named} --kill"
        raise UsageError("Give a command, or --kill.", remedy=remedy)
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
        """As it is: the command is the user's own, and may well draw."""
        with lock:  # standard output is for the object
            print(f"[{index}] {line}", file=sys.stderr if json_ or channel == STDERR else sys.stdout, flush=True)

    try:
        ends = run_in_all(cluster, record, words, show_line, chosen)
    except KeyboardInterrupt:
        if record.work.mode != "hold":
            say("\nThe command may go on in the pods: only held pods are told.", sys.stderr)
        raise
    for end in ends:
        if end.problem:
            say(f"[{end.index}] {end.problem}", sys.stderr)
        elif end.exit_code:
            say(f"[{end.index}] ended with exit code {end.exit_code}.", sys.stderr)
    nodes = [{"node": end.index, "pod": end.pod, "exit_code": end.exit_code} for end in ends]
    if json_:
        show(json_, {"run_id": record.run_id, "nodes": nodes}, "")
    failed = [ClusterError.exit_code if end.exit_code is None else end.exit_code for end in ends if end.exit_code != 0]
    if failed:
        raise typer.Exit(failed[0])


def _start(cluster: "Cluster", record: "Record", words: list[str], chosen: list[str], json_: bool) -> None:
    from llmtrain.operate.exec.run_in_pods import start_in_all
    from llmtrain.operate.status.view import count

    pods = start_in_all(cluster, record, words, chosen)
    run = f"{record.run_id}{cluster.place(record.namespace)}"
    text = (
        f"Started in {count(len(pods), 'pod')}. What it says: llmtrain logs {run} -f (kept on the runs volume). "
        f"End it: llmtrain exec {run} --kill."
    )
    show(json_, {"run_id": record.run_id, "started": [pod.name for pod in pods]}, text)


def _kill(cluster: "Cluster", record: "Record", chosen: list[str], json_: bool) -> None:
    from llmtrain.operate.exec.run_in_pods import end_in_all

    pods = end_in_all(cluster, record, chosen)
    text = f"Ended in {', '.join(pod.name for pod in pods)}." if pods else "Nothing was running there."
    show(json_, {"run_id": record.run_id, "ended": [pod.name for pod in pods]}, text)
