"""llmtrain recover: let a run go on whose machine is lost, or of which a rank hangs."""

from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.commands.options import JsonOption, show


def command(
    run: RunArgument,
    after: Annotated[float, typer.Option(min=0, help="Seconds that a machine or a rank must have been silent.")] = 60.0,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Give up pods on machines that do not answer, and pods with a rank that hangs, so that others take their place.
    Nothing is lost but the steps since the newest checkpoint; should the machine come back, what runs there writes
    nothing more."""
    from dataclasses import asdict

    from llmtrain.launch.record import find_record
    from llmtrain.operate.guard.recover import find_lost, recover
    from llmtrain.operate.guard.stalled_pods import find_stalled, replace_stalled
    from llmtrain.operate.status.run_status import find_pods

    cluster = connect(kubeconfig, context)
    record = find_record(cluster, run, namespace or cluster.namespace)
    lost, early = find_lost(find_pods(cluster, record), after)
    lost = recover(cluster, record.namespace, lost)
    lines = [f"{pod.name} on {pod.machine}, silent for {pod.since_sec:.0f} s, was given up." for pod in lost]
    lines += [
        f"{pod.name} on {pod.machine} is silent for {pod.since_sec:.0f} s only: --after {after:.0f}." for pod in early
    ]
    frozen, what = ([], "") if lost or early else find_stalled(cluster, record, after)
    frozen = replace_stalled(cluster, record.namespace, frozen)
    lines += [what] if frozen else []
    lines += [f"{pod.name} (rank {pod.ranks}) on {pod.node or 'a machine'} was deleted." for pod in frozen]
    value = {
        "run_id": run,
        "recovered": [asdict(pod) for pod in lost],
        "too_early": [asdict(pod) for pod in early],
        "frozen": [asdict(pod) for pod in frozen],
    }
    show(json_, value, "\n".join(lines) or f"No pod of run {run} is on a lost machine or hangs.")
