"""llmtrain stop: save a checkpoint and stop a run."""

import sys
from typing import Any

from llmtrain.commands.cluster_options import RunArgument, find_run
from llmtrain.commands.options import CURRENT, JsonOption, print_warning, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import say
from llmtrain.core.text import plural


@with_option_groups
def command(
    run: RunArgument,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Save a checkpoint and stop a run. Its objects are removed; its data and its record are kept."""
    found = find_run(run, place)
    stopped = found.stop(on_wait=PodCount(), on_line=print_log_line)
    if stopped.had_ended:
        sentences = [f"Run {run} had already {stopped.state}; its objects were removed."]
    else:
        sentences = [f"Run {run} stopped.", f"Resume it: llmtrain resume {found.in_commands}."]
    if found.record.has_files:
        sentences.append(f"Download it: llmtrain fetch {found.in_commands}.")
    value = {
        "run_id": run,
        "namespace": found.record.namespace,
        "state": stopped.state,
        "lost_pods": stopped.lost_pods,
    }
    show(json_, value, " ".join(sentences))
    warn_of_stuck_pods(stopped.lost_pods)


def print_log_line(line: str) -> None:
    say(line, sys.stderr)


class PodCount:
    """Prints how many pods are still shutting down whenever the number changes."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, pods: list[dict[str, Any]]) -> None:
        active = sum(pod.get("status", {}).get("phase") not in ("Succeeded", "Failed") for pod in pods)
        if active and active != self._last:
            say(f"waiting for {plural(active, 'pod')} to save and exit", sys.stderr)
        self._last = active


def warn_of_stuck_pods(pods: list[str]) -> None:
    if pods:
        print_warning(
            f"{', '.join(pods)} did not exit in time. If its node is unreachable, the pod stays until the node is back."
        )
