"""llmtrain delete: remove one run or all runs from the cluster."""

import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import connect_to_namespace
from llmtrain.commands.options import CURRENT, JsonOption, show, with_option_groups
from llmtrain.commands.stop import PodCount, print_log_line, warn_of_stuck_pods
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import printable
from llmtrain.errors import ClusterError, LlmtrainError, UsageError


@with_option_groups
def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run id.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Delete all runs of the namespace.")] = False,
    data: Annotated[bool, typer.Option("--data", help="Also delete the volumes created for the run.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Remove a run from the cluster; a running one saves a checkpoint first. Volumes are kept unless --data is given;
    volumes that existed before the run are always kept."""
    from llmtrain.launch.record import list_records
    from llmtrain.operate.cluster_run import ClusterRun

    if (run is None) is not all_:
        raise UsageError("Pass a run id or --all.")
    cluster, namespace = connect_to_namespace(place, run)
    if run is None:
        runs = [ClusterRun(cluster, record) for record in list_records(cluster, namespace)]
    else:
        runs = [ClusterRun.find(cluster, run, namespace)]
    if runs and (all_ or data) and not yes:
        which = ", ".join(each.record.run_id for each in runs)
        with_data = " with all data" if data else ""
        _confirm(f"Delete {which}{with_data} in namespace {namespace} of {cluster.name}?")
    stuck: list[str] = []
    kept: list[str] = []
    names: list[str] = []
    failed: dict[str, LlmtrainError] = {}
    for each in runs:
        try:
            deleted = each.delete(data=data, on_wait=PodCount(), on_line=print_log_line)
        except LlmtrainError as problem:
            if not all_:
                raise
            failed[each.record.run_id] = problem
            continue
        names.append(each.record.run_id)
        stuck += deleted.lost_pods
        if deleted.kept_claim:
            kept.append(deleted.kept_claim)
    lines = [f"Run {name} deleted." for name in names]
    if not runs:
        lines.append(f"No runs in namespace {namespace}.")
    lines += [f"Data kept on claim {claim}." for claim in sorted(set(kept))]
    value = {"deleted": names, "failed": list(failed), "namespace": namespace, "kept_claims": kept, "lost_pods": stuck}
    show(json_, value, "\n".join(lines))
    warn_of_stuck_pods(stuck)
    if failed:
        raise _some_failed(failed, len(runs))


def _some_failed(failed: dict[str, LlmtrainError], count: int) -> ClusterError:
    """One error for all runs that could not be deleted, with each remedy once."""
    problems = []
    remedies = []
    for name, problem in failed.items():
        problems.append(f"{name}: {problem.what}")
        if problem.remedy and problem.remedy not in remedies:
            remedies.append(problem.remedy)
    return ClusterError(
        f"{len(failed)} of {count} runs could not be deleted. {' '.join(problems)}", remedy="; ".join(remedies) or None
    )


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(question, remedy="Not a terminal. Pass --yes to confirm.")
    if not typer.confirm(printable(question)):
        raise typer.Exit(1)
