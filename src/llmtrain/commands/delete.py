"""llmtrain delete: remove one run or all runs from the cluster."""

import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.commands.stop import PodCount, print_rank0_log, warn_of_stuck_pods
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.terminal import printable


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run id.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Delete all runs of the namespace.")] = False,
    data: Annotated[bool, typer.Option("--data", help="Also delete the volumes created for the run.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove a run from the cluster; a running one saves a checkpoint first. Volumes are kept unless --data is given;
    volumes that existed before the run are always kept."""
    from llmtrain.launch import lifecycle
    from llmtrain.launch.record import find_record, list_records

    if (run is None) is not all_:
        raise UsageError("Pass a run id or --all.")
    cluster = connect(kubeconfig, context, run)
    namespace = namespace or cluster.namespace
    records = list_records(cluster, namespace) if run is None else [find_record(cluster, run, namespace)]
    if records and (all_ or data) and not yes:
        which = ", ".join(record.run_id for record in records)
        _confirm(f"Delete {which}{' with all data' if data else ''} in namespace {namespace} of {cluster.name}?")
    stuck: list[str] = []
    kept: list[str] = []
    names: list[str] = []
    failed: dict[str, LlmtrainError] = {}
    for record in records:
        try:
            print_rank0_log(cluster, record)
            stuck += lifecycle.delete(cluster, record, data, PodCount())
        except LlmtrainError as problem:
            if not all_:
                raise
            failed[record.run_id] = problem
            continue
        names.append(record.run_id)
        if not data or record.config.launch.runs_volume.claim:
            kept.append(record.runs_claim)
    lines = [f"Run {name} deleted." for name in names]
    lines += [] if records else [f"No runs in namespace {namespace}."]
    lines += [f"Data kept on claim {claim}." for claim in sorted(set(kept))]
    value = {"deleted": names, "failed": list(failed), "namespace": namespace, "kept_claims": kept, "lost_pods": stuck}
    show(json_, value, "\n".join(lines))
    warn_of_stuck_pods(stuck)
    if failed:
        problems = " ".join(f"{name}: {problem.what}" for name, problem in failed.items())
        raise ClusterError(
            f"{len(failed)} of {len(records)} runs could not be deleted. {problems}",
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in failed.values() if problem.remedy)) or None,
        )


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(question, remedy="Not a terminal. Pass --yes to confirm.")
    if not typer.confirm(printable(question)):
        raise typer.Exit(1)
