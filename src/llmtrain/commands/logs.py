"""llmtrain logs: print the logs of all pods of a run."""

import json
import os
import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.terminal import printable_line


def command(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only the pod that runs this rank.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Number of lines from the end of each pod's log.", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object per log line.")] = False,
) -> None:
    """Print the logs of all pods of a run, merged by time; each line starts with the pod's node rank. Logs of replaced
    containers and pods are included. If all pods are gone, the log files on the runs volume are read."""
    from llmtrain.launch.record import find_record
    from llmtrain.operate.logs.merged_logs import line_as_dict, merged_logs

    cluster = connect(kubeconfig, context, run)
    record = find_record(cluster, run, namespace or cluster.namespace)
    is_terminal = sys.stdout.isatty()
    try:
        for line in merged_logs(cluster, record, rank=rank, follow=follow, tail=tail):
            value = line_as_dict(line, record.config.launch.processes_per_node) if json_ else None
            text = json.dumps(value) if json_ else f"[{line.index}] {line.text}"
            # Escape sequences are removed for a terminal only; a file or pipe gets the original bytes.
            print(printable_line(text) if is_terminal else text, flush=follow)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader (`| head`) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
