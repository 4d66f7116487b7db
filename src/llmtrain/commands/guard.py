"""llmtrain guard: recover runs of a namespace from inside the cluster."""

import os
from dataclasses import asdict
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import check_image, connect_to_namespace
from llmtrain.commands.options import CURRENT, JsonOption, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace
from llmtrain.core.env import WEBHOOK

HELP = "Recover runs and send notifications from inside the cluster."
app = typer.Typer(help=HELP, no_args_is_help=True)


@app.callback(help=HELP)
def group() -> None:
    pass


@app.command("install")
@with_option_groups
def install_command(
    image: Annotated[
        str | None, typer.Option(help="llmtrain image; a new guard requires it. Default: the installed one.")
    ] = None,
    after: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds a node must be NotReady before its pods are replaced. Initially 60."),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            envvar=WEBHOOK,
            help="URL to post each event to as JSON; stored in a Secret. '' removes it.",
        ),
    ] = None,
    pull_policy: Annotated[
        str | None,
        typer.Option("--image-pull-policy", help="IfNotPresent (initially), Always or Never."),
    ] = None,
    pull_secret: Annotated[
        list[str] | None, typer.Option("--image-pull-secret", help="Secret of a private registry.", show_default=False)
    ] = None,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Install a small pod that replaces pods on unreachable nodes (as `recover` does) and notifies a webhook when a run
    finishes, fails or is recovered. Run it again to change options; the others keep their values."""
    from llmtrain.guard.install import GuardOptions, install_guard

    check_image(image)
    cluster, namespace = connect_to_namespace(place)
    options = GuardOptions(image, after, webhook, pull_policy, pull_secret)
    installed = install_guard(cluster, namespace, options)
    show(json_, asdict(installed), installed.text)


@app.command("remove")
@with_option_groups
def remove_command(
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Remove the guard of a namespace with its ServiceAccount and Role. Runs are not affected."""
    from llmtrain.guard.install import remove_guard

    cluster, namespace = connect_to_namespace(place)
    is_removed = remove_guard(cluster, namespace)
    text = f"Namespace {namespace} has no guard."
    if is_removed:
        text = f"Guard removed from namespace {namespace}."
    show(json_, {"namespace": namespace, "removed": is_removed}, text)


@app.command("status")
@with_option_groups
def status_command(
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Show whether a namespace has a guard, its settings and its latest log lines."""
    from llmtrain.guard.status import guard_status

    cluster, namespace = connect_to_namespace(place)
    status = guard_status(cluster, namespace)
    if status is None:
        remedy = f"Install one: llmtrain guard install{cluster.place(namespace)}"
        show(json_, {"namespace": namespace, "installed": False}, f"Namespace {namespace} has no guard. {remedy}")
        return
    value = {"namespace": namespace, "installed": True, **asdict(status)}
    show(json_, value, f"Namespace {namespace}: {status.text}")


@app.command("watch", hidden=True)
@with_option_groups
def watch_command(
    after: Annotated[float, typer.Option(min=0)] = 60.0,
    _with_logs: Annotated[
        bool, typer.Option("--with-logs", help="Ignored: passed by a guard that the first version installed.")
    ] = False,
    place: ClusterPlace = CURRENT,
) -> None:
    """Watch the runs of a namespace until SIGTERM. The guard's pod runs this command."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.core.logs import setup_logging
    from llmtrain.guard.watch import watch_namespace

    setup_logging(LoggingSection())
    cluster, namespace = connect_to_namespace(place)
    watch_namespace(cluster, namespace, after, os.environ.get(WEBHOOK))
