"""llmtrain recover: replace pods on unreachable nodes, and pods with a hung rank."""

from dataclasses import asdict
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import RunArgument, find_run
from llmtrain.commands.options import CURRENT, JsonOption, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace


@with_option_groups
def command(
    run: RunArgument,
    after: Annotated[
        float, typer.Option(min=0, help="Seconds a node must be NotReady, or a rank without progress.")
    ] = 60.0,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Replace pods on unreachable nodes, and pods with a hung rank. The run resumes from its newest checkpoint. If the
    node comes back, the processes still running there can no longer write to the run."""
    from llmtrain.operate.recover import recover_run

    done = recover_run(find_run(run, place).look(), after)
    lines = []
    for pod in done.lost:
        lines.append(f"{pod.name} was removed; a new pod will replace it ({pod.text}).")
    for pod in done.early:
        lines.append(f"{pod.name} was not removed: {pod.text}, less than --after {after:.0f}.")
    if done.stalled:
        lines.append(done.evidence)
    for hung in done.stalled:
        lines.append(f"{hung.name} (rank {hung.ranks}) on {hung.node or 'an unknown node'} was deleted.")
    value = {
        "run_id": run,
        "recovered": [asdict(pod) for pod in done.lost],
        "too_early": [asdict(pod) for pod in done.early],
        "frozen": [asdict(pod) for pod in done.stalled],
    }
    show(json_, value, "\n".join(lines) or f"No pod of run {run} is on an unreachable node or hung.")
