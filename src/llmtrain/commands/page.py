"""llmtrain page: show runs in the browser."""

import importlib.util
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import connect_to_namespace
from llmtrain.commands.options import CURRENT, DEFAULT_ROOT, RootOption, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.install import install_command
from llmtrain.core.terminal import say
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.page.cluster_runs import ClusterRuns

DEFAULT_PORT = 8642
_PACKAGES = ("starlette", "uvicorn")


@with_option_groups
def command(
    root: RootOption = DEFAULT_ROOT,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port. 0: any free port.")] = DEFAULT_PORT,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other machines can connect only with --certfile and --keyfile.")
    ] = "127.0.0.1",
    certfile: Annotated[str | None, typer.Option(help="TLS certificate (PEM).", show_default=False)] = None,
    keyfile: Annotated[str | None, typer.Option(help="Private key of the certificate.", show_default=False)] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the browser.")] = False,
    no_cluster: Annotated[bool, typer.Option("--no-cluster", help="Show only the runs in --root.")] = False,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let the page stop, resume, recover and delete runs.")
    ] = False,
    place: ClusterPlace = CURRENT,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the URL once the page can be opened.")
    ] = False,
) -> None:
    """Show all runs in the browser: curves, ranks, logs and causes, live. With a kubeconfig, also the runs of a
    namespace. The printed URL contains a token: anyone who has it can see the runs."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"`llmtrain page` needs packages that are not installed: {', '.join(missing)}.",
            remedy=f"Run: {install_command('page')}",
        )
    from llmtrain.page.serve import ServeOptions, serve

    cluster = None if no_cluster else _cluster(place)
    serve(ServeOptions(root, host, port, certfile, keyfile, not no_open, allow_actions, json_), cluster)


def _cluster(place: ClusterPlace) -> "ClusterRuns | None":
    """None without a usable kubeconfig, unless an option asks for a cluster."""
    from llmtrain.kubernetes.kubeconfig import has_kubeconfig

    is_asked_for = place != CURRENT
    if not is_asked_for and not has_kubeconfig(None):
        return None
    try:
        cluster, namespace = connect_to_namespace(place)
    except UsageError as problem:
        if is_asked_for:
            raise
        say(f"Runs on a cluster are not shown. {problem.what} {problem.remedy or ''}".rstrip(), sys.stderr)
        return None
    from llmtrain.page.cluster_runs import ClusterRuns

    return ClusterRuns(cluster, namespace)
