"""llmtrain delete: remove a run, or all, from the cluster."""

import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.commands.stop import PodCount, listen, warn_of_lost
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.terminal import printable


def command(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run id.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="All runs of the namespace.")] = False,
    data: Annotated[bool, typer.Option("--data", help="Delete the volumes made for the run too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --all or --data.")] = False,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove a run from the cluster; one that is going saves and ends first. Volumes stay unless --data is given, and
    volumes that were there before the run always."""
    from llmtrain.launch import lifecycle as apply
    from llmtrain.launch.record import find_record, list_records

    if (run is None) is not all_:
        raise UsageError("Give the id of a run, or --all.")
    cluster = connect(kubeconfig, context)
    place = namespace or cluster.namespace
    records = list_records(cluster, place) if run is None else [find_record(cluster, run, place)]
    if records and (all_ or data) and not yes:
        which = ", ".join(record.run_id for record in records)
        _ask(f"Delete {which}{' with all data' if data else ''} in namespace {place} of {cluster.name}?")
    left: list[str] = []
    kept: list[str] = []
    names: list[str] = []
    failed: dict[str, LlmtrainError] = {}
    for record in records:
        try:
            listen(cluster, record)
            left += apply.delete(cluster, record, data, PodCount())
        except LlmtrainError as problem:
            if not all_:
                raise
            failed[record.run_id] = problem
            continue
        names.append(record.run_id)
        if not data or record.config.launch.runs_volume.claim:
            kept.append(record.runs_claim)
    lines = [f"Run {name} is deleted." for name in names]
    lines += [] if records else [f"There are no runs in namespace {place}."]
    lines += [f"Data stays on claim {claim}." for claim in sorted(set(kept))]
    value = {"deleted": names, "failed": list(failed), "namespace": place, "kept_claims": kept, "lost_pods": left}
    show(json_, value, "\n".join(lines))
    warn_of_lost(left)
    if failed:
        said = " ".join(f"{name}: {problem.what}" for name, problem in failed.items())
        raise ClusterError(
            f"{len(failed)} of {len(records)} runs could not be deleted. {said}",
            remedy="; ".join(dict.fromkeys(problem.remedy for problem in failed.values() if problem.remedy)) or None,
        )


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(question, remedy="Add --yes: nobody can be asked here.")
    if not typer.confirm(printable(question)):
        raise typer.Exit(1)
