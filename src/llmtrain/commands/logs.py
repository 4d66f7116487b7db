"""llmtrain logs: print the logs of all pods of a run."""

import json
import os
import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import RunArgument, find_run
from llmtrain.commands.options import CURRENT, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import printable_line


@with_option_groups
def command(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only the pod that runs this rank.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the logs until the run ends.")] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Number of lines from the end of each pod's log.", show_default=False)
    ] = None,
    place: ClusterPlace = CURRENT,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object per log line.")] = False,
) -> None:
    """Print the logs of all pods of a run, merged by time; each line starts with the pod's node rank. Logs of replaced
    containers and pods are included. If all pods are gone, the log files on the runs volume are read."""
    from llmtrain.operate.logs.merged_logs import line_as_dict

    found = find_run(run, place)
    is_terminal = sys.stdout.isatty()
    try:
        for line in found.logs(rank=rank, follow=follow, tail=tail):
            text = f"[{line.index}] {line.text}"
            if json_:
                text = json.dumps(line_as_dict(line, found.record.config.launch.processes_per_node))
            # Escape sequences are removed for a terminal only; a file or pipe gets the original bytes.
            print(printable_line(text) if is_terminal else text, flush=follow)
    except KeyboardInterrupt:
        return
    except BrokenPipeError:  # the reader (`| head`) closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
