"""llmtrain stop: let a run of the cluster save and end; it can be resumed."""

import sys
import threading
from typing import TYPE_CHECKING, Any

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.launch.record import Record


def command(
    run: RunArgument,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Tell a run to save a checkpoint and end. Its objects are removed, its data and its record stay."""
    from llmtrain.commands.watch import HAVE_FILES
    from llmtrain.launch import lifecycle as apply
    from llmtrain.launch.record import find_record
    from llmtrain.operate.status.run_status import run_status

    cluster = connect(kubeconfig, context)
    record = find_record(cluster, run, namespace or cluster.namespace)
    try:
        before = run_status(cluster, record, with_usage=False).state
    except UsageError:  # objects that nobody understands can be removed all the same
        before = None
    ended_as = before if before in ("finished", "failed") else None
    listen(cluster, record)
    left = apply.stop(cluster, record, PodCount(), ended_as)
    state = ended_as or "stopped"
    named = f"{run}{cluster.place(record.namespace)}"
    text = f"Run {run} had {state} before; its objects are removed." if ended_as else f"Run {run} is stopped."
    text += "" if ended_as else f" Go on with it: llmtrain resume {named}."
    text += f" Bring it here: llmtrain fetch {named}." if record.work.mode in HAVE_FILES else ""
    show(json_, {"run_id": run, "namespace": record.namespace, "state": state, "lost_pods": left}, text)
    warn_of_lost(left)


class PodCount:
    """Says how many pods are still ending, each time that changes."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, pods: list[dict[str, Any]]) -> None:
        going = sum(pod.get("status", {}).get("phase") not in ("Succeeded", "Failed") for pod in pods)
        if going and going != self._last:
            say(f"waiting for {going} pod{'s' if going != 1 else ''} to save and end", sys.stderr)
        self._last = going


def listen(cluster: "Cluster", record: "Record") -> None:
    """Print what rank 0 says from now on: whether and where it saves."""
    from llmtrain.operate.status.run_status import run_status

    try:
        first = [pod for pod in run_status(cluster, record, with_log=False, with_usage=False).pods if pod.index == 0]
    except UsageError:  # the log is a courtesy
        return

    def copy(pod: str) -> None:
        try:
            for line in cluster.log(pod, record.namespace, record.workload.container, tail=0, follow=True):
                say(line, sys.stderr)
        except LlmtrainError:  # the log is a courtesy
            return

    for pod in first:
        if pod.phase == "Running":
            threading.Thread(target=copy, args=(pod.name,), daemon=True).start()


def warn_of_lost(pods: list[str]) -> None:
    if pods:
        say(
            f"warning: {', '.join(pods)} did not end in time. The machine may be lost: the pod stays until it is back.",
            sys.stderr,
        )
