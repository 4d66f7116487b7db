"""llmtrain status: how the runs of a cluster do."""

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import (
    AllNamespacesOption,
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    RecoverOption,
    connect,
)
from llmtrain.commands.options import JsonOption, show
from llmtrain.errors import ClusterError, UsageError
from llmtrain.terminal import printable, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.kubernetes.client import Cluster
    from llmtrain.operate.status.run_status import RunStatus

AGAIN_SEC = 2.0
TAIL_LINES = 20  # of the log of a run that is watched from now on


def command(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run id. Default: all.", show_default=False)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on: one run to its end, all until Ctrl-C.")] = False,
    recover: RecoverOption = None,
    all_namespaces: AllNamespacesOption = False,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """How the runs of a cluster do: all of a namespace, or one with its pods."""
    if all_namespaces and (run or namespace):
        raise UsageError("--all-namespaces is for the table of all runs; leave RUN and --namespace out.")
    if watch and json_ and not run:
        raise UsageError("--watch without a run never ends, so it has no JSON object.", remedy="Name a run.")
    if recover is not None and not (run and watch):
        raise UsageError("--recover-lost-nodes acts while one run is watched.", remedy="Name a run, and add --watch.")
    cluster = connect(kubeconfig, context)
    place = None if all_namespaces else namespace or cluster.namespace
    if run is None:
        _show_all(cluster, place, watch, json_)
    else:
        _show_one(cluster, run, str(place), watch, recover, json_)


def _show_one(
    cluster: "Cluster", run: str, namespace: str, watch: bool, recover_after: float | None, json_: bool
) -> None:
    from llmtrain.launch.record import find_record
    from llmtrain.operate.status.run_status import run_status
    from llmtrain.operate.status.tables import run_text

    record = find_record(cluster, run, namespace)
    if not watch:
        status = run_status(cluster, record)
        show(json_, status.as_dict(), run_text(status))
        return

    from llmtrain.operate.status.watch import follow

    out = sys.stderr if json_ else sys.stdout  # standard output is for the object
    try:
        status = follow(
            cluster, record, is_terminal=out.isatty(), out=out, tail=TAIL_LINES, recover_after=recover_after
        )
    except KeyboardInterrupt:  # the watching ends, not the run
        return
    if json_:
        show(json_, status.as_dict(), "")


def _show_all(cluster: "Cluster", namespace: str | None, watch: bool, json_: bool) -> None:
    from llmtrain.operate.status.run_status import all_status
    from llmtrain.operate.status.tables import runs_table

    where = f"namespace {namespace}" if namespace else "any namespace"

    def text(found: "list[RunStatus]") -> str:
        return (
            runs_table(found, with_namespace=namespace is None) if found else f"No runs in {where} of {cluster.name}."
        )

    if not watch:
        found = all_status(cluster, namespace)
        value = {"context": cluster.name, "namespace": namespace, "runs": [status.as_dict() for status in found]}
        show(json_, value, text(found))
        return
    _again(lambda: text(all_status(cluster, namespace)))


def _again(make: "Callable[[], str]") -> None:
    """The same table over and over: in place in a terminal, else again when it has changed. Ctrl-C is the way out."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    last = ""
    with suppress(KeyboardInterrupt), Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            try:
                text = make()
            except ClusterError as problem:  # it may come back
                text = problem.what
            if sys.stdout.isatty():
                live.update(Text(printable(text), no_wrap=True, overflow="ellipsis"), refresh=True)
            elif text != last:
                say(f"{text}\n")
            last = text
            time.sleep(AGAIN_SEC)
