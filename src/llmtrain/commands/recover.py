"""llmtrain recover: replace pods on unreachable nodes, and pods with a hung rank."""

from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.commands.options import JsonOption, show


def command(
    run: RunArgument,
    after: Annotated[
        float, typer.Option(min=0, help="Seconds a node must be NotReady, or a rank without progress.")
    ] = 60.0,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Replace pods on unreachable nodes, and pods with a hung rank. The run resumes from its newest checkpoint. If the
    node comes back, the processes still running there can no longer write to the run."""
    from dataclasses import asdict

    from llmtrain.launch.record import find_record
    from llmtrain.operate.guard.recover import find_lost, recover
    from llmtrain.operate.guard.stalled_pods import find_stalled, replace_stalled
    from llmtrain.operate.status.run_status import find_pods

    cluster = connect(kubeconfig, context, run)
    record = find_record(cluster, run, namespace or cluster.namespace)
    lost, early = find_lost(find_pods(cluster, record), after)
    lost = recover(cluster, record.namespace, lost)
    lines = [f"{pod.name} was removed; a new pod will replace it ({pod.text})." for pod in lost]
    lines += [f"{pod.name} was not removed: {pod.text}, less than --after {after:.0f}." for pod in early]
    stalled, evidence = ([], "") if lost or early else find_stalled(cluster, record, after)
    stalled = replace_stalled(cluster, record.namespace, stalled)
    lines += [evidence] if stalled else []
    lines += [f"{pod.name} (rank {pod.ranks}) on {pod.node or 'an unknown node'} was deleted." for pod in stalled]
    value = {
        "run_id": run,
        "recovered": [asdict(pod) for pod in lost],
        "too_early": [asdict(pod) for pod in early],
        "frozen": [asdict(pod) for pod in stalled],
    }
    show(json_, value, "\n".join(lines) or f"No pod of run {run} is on an unreachable node or hung.")
