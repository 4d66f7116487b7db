"""llmtrain logs: what the nodes of a run say."""

import json
import os
import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.terminal import printable_line


def command(
    run: RunArgument,
    rank: Annotated[int | None, typer.Option(min=0, help="Only the node of this rank.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Only the last lines of each node.", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object per line of the log.")] = False,
) -> None:
    """The logs of all nodes of a run, merged by time, each line behind the number of its node. Containers and pods that
    were replaced come first; when all pods are gone, the logs kept on the runs volume are read."""
    from llmtrain.launch.record import find_record
    from llmtrain.operate.logs.merged_logs import line_as_dict, merged_logs

    cluster = connect(kubeconfig, context)
    record = find_record(cluster, run, namespace or cluster.namespace)
    is_terminal = sys.stdout.isatty()
    try:
        for line in merged_logs(cluster, record, rank=rank, follow=follow, tail=tail):
            value = line_as_dict(line, record.config.launch.processes_per_node) if json_ else None
            text = json.dumps(value) if json_ else f"[{line.index}] {line.text}"
            # A terminal must not act on it; a file or a pipe gets the log as it was written, colors and all.
            print(printable_line(text) if is_terminal else text, flush=follow)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
