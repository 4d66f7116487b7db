"""llmtrain why: diagnose a run."""

from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import find_run as find_cluster_run
from llmtrain.commands.options import (
    CURRENT,
    DEFAULT_ROOT,
    JsonOption,
    RootOption,
    complete_run,
    show,
    with_option_groups,
)
from llmtrain.core.arguments import ClusterPlace
from llmtrain.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from llmtrain.runs.view import RunView


@with_option_groups
def command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Run id, or path of a run directory.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ],
    root: RootOption = DEFAULT_ROOT,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Diagnose a run: cause, evidence and remedy. Exits 1 if no cause was found.

    A path, or the id of a run in --root that was started on this machine, is diagnosed from its directory. Any other
    id, and every id with --namespace, --context or --kubeconfig, is a run on the cluster."""
    is_on_cluster = place != CURRENT
    local = None if is_on_cluster else _local_run(run, root)
    if local:
        from llmtrain.runs.explain import explain_local

        why = explain_local(local)
    else:
        why = find_cluster_run(run, place).why()
    show(json_, why.as_dict(), why.text)
    if why.cause == "unknown":
        raise typer.Exit(ExitCode.PROBLEM)


def _local_run(run: str, root: str) -> "RunView | None":
    """None for a run on the cluster. A copy of one (`llmtrain fetch`) is only meant by its path: it may be old."""
    from llmtrain.runs.directory import find_run
    from llmtrain.runs.view import RunView

    if "/" in run:
        return RunView(find_run(root, run))
    try:
        view = RunView(find_run(root, run))
    except UsageError:
        return None
    return None if view.last_start.get("launch") else view
