"""llmtrain status: show the status of runs."""

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import AllNamespacesOption, RecoverOption, connect_to_namespace
from llmtrain.commands.options import CURRENT, JsonOption, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.terminal import printable, say
from llmtrain.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmtrain.kubernetes.client import Cluster
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.status.run_status import RunStatus

REFRESH_SEC = 2.0
TAIL_LINES = 20  # log lines shown when watching starts


@with_option_groups
def command(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Run id. Default: all runs.", show_default=False)
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Watch one run until it ends, or all runs until Ctrl-C.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Also show the loss curves of one run.")] = False,
    recover: RecoverOption = None,
    all_namespaces: AllNamespacesOption = False,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Show the status of runs: all runs of a namespace, or one run with its pods."""
    if all_namespaces and (run or place.namespace):
        raise UsageError("--all-namespaces cannot be combined with RUN or --namespace.", remedy="Omit one of them.")
    if watch and json_ and not run:
        raise UsageError("--watch --json needs a run: it prints one object when the run ends.", remedy="Pass a run id.")
    if recover is not None and not (run and watch):
        raise UsageError(
            "--recover-lost-nodes only works with --watch and one run.", remedy="Pass a run id and --watch."
        )
    if plot and (not run or watch or json_):
        raise UsageError("--plot needs a run, and neither --watch nor --json.", remedy="Pass a run id only.")
    cluster, namespace = connect_to_namespace(place, run)
    if run is None:
        _show_all(cluster, None if all_namespaces else namespace, watch, json_)
        return
    from llmtrain.operate.cluster_run import ClusterRun

    found = ClusterRun.find(cluster, run, namespace)
    if watch:
        _watch_one(found, recover, json_)
    else:
        _show_one(found, plot, json_)


def _show_one(run: "ClusterRun", plot: bool, json_: bool) -> None:
    from llmtrain.operate.status.tables import run_text

    status = run.status()
    show(json_, status.as_dict(), run_text(status))
    if plot:
        from llmtrain.commands.loss_plot import print_plot
        from llmtrain.operate.status.log_curves import log_curves

        print_plot(log_curves(run.look()), status.run_id)


def _watch_one(run: "ClusterRun", recover_after: float | None, json_: bool) -> None:
    out = sys.stderr if json_ else sys.stdout  # stdout is for the JSON object
    try:
        status = run.follow(out, is_terminal=out.isatty(), tail=TAIL_LINES, recover_after=recover_after)
    except KeyboardInterrupt:  # stops watching, not the run
        return
    if json_:
        show(json_, status.as_dict(), "")


def _show_all(cluster: "Cluster", namespace: str | None, watch: bool, json_: bool) -> None:
    from llmtrain.operate.status.all_runs import all_status
    from llmtrain.operate.status.tables import runs_table

    where = f"namespace {namespace}" if namespace else "any namespace"

    def text(runs: "list[RunStatus]") -> str:
        if not runs:
            return f"No runs in {where} of {cluster.name}."
        return runs_table(runs, with_namespace=namespace is None)

    if not watch:
        runs = all_status(cluster, namespace)
        value = {"context": cluster.name, "namespace": namespace, "runs": [status.as_dict() for status in runs]}
        show(json_, value, text(runs))
        return
    _refresh(lambda: text(all_status(cluster, namespace)))


def _refresh(make_text: "Callable[[], str]") -> None:
    """Print the text until Ctrl-C: redrawn in place in a terminal, elsewhere again whenever it changes."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    last = ""
    with suppress(KeyboardInterrupt), Live(console=Console(), auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            try:
                text = make_text()
            except ClusterError as problem:  # may be temporary
                text = problem.what
            if sys.stdout.isatty():
                live.update(Text(printable(text), no_wrap=True, overflow="ellipsis"), refresh=True)
            elif text != last:
                say(f"{text}\n")
            last = text
            time.sleep(REFRESH_SEC)
