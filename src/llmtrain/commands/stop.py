"""llmtrain stop: save a checkpoint and stop a run."""

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
    """Save a checkpoint and stop a run. Its objects are removed; its data and its record are kept."""
    from llmtrain.commands.watch import MODES_WITH_FILES
    from llmtrain.launch import lifecycle
    from llmtrain.launch.record import find_record
    from llmtrain.operate.status.run_status import run_status

    cluster = connect(kubeconfig, context, run)
    record = find_record(cluster, run, namespace or cluster.namespace)
    try:
        before = run_status(cluster, record, with_usage=False).state
    except UsageError:  # malformed objects can still be removed
        before = None
    ended_as = before if before in ("finished", "failed") else None
    print_rank0_log(cluster, record)
    stuck = lifecycle.stop(cluster, record, PodCount(), ended_as)
    state = ended_as or "stopped"
    named = f"{run}{cluster.place(record.namespace)}"
    text = f"Run {run} had already {state}; its objects were removed." if ended_as else f"Run {run} stopped."
    text += "" if ended_as else f" Resume it: llmtrain resume {named}."
    text += f" Download it: llmtrain fetch {named}." if record.work.mode in MODES_WITH_FILES else ""
    show(json_, {"run_id": run, "namespace": record.namespace, "state": state, "lost_pods": stuck}, text)
    warn_of_stuck_pods(stuck)


class PodCount:
    """Prints how many pods are still shutting down whenever the number changes."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, pods: list[dict[str, Any]]) -> None:
        active = sum(pod.get("status", {}).get("phase") not in ("Succeeded", "Failed") for pod in pods)
        if active and active != self._last:
            say(f"waiting for {active} pod{'s' if active != 1 else ''} to save and exit", sys.stderr)
        self._last = active


def print_rank0_log(cluster: "Cluster", record: "Record") -> None:
    """Print new log lines of rank 0 in the background: whether and where it saves."""
    from llmtrain.operate.status.run_status import run_status

    try:
        first = [pod for pod in run_status(cluster, record, with_log=False, with_usage=False).pods if pod.index == 0]
    except UsageError:  # stopping does not depend on the log
        return

    def copy(pod: str) -> None:
        try:
            for line in cluster.log(pod, record.namespace, record.workload.container, tail=0, follow=True):
                say(line, sys.stderr)
        except LlmtrainError:  # stopping does not depend on the log
            return

    for pod in first:
        if pod.phase == "Running":
            threading.Thread(target=copy, args=(pod.name,), daemon=True).start()


def warn_of_stuck_pods(pods: list[str]) -> None:
    if pods:
        say(
            f"warning: {', '.join(pods)} did not exit in time. If its node is unreachable, the pod stays "
            "until the node is back.",
            sys.stderr,
        )
