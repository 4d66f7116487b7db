"""llmtrain guard: recover runs of a namespace from inside the cluster."""

import os
import signal
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.env import WEBHOOK

HELP = "Recover runs and send notifications from inside the cluster."
app = typer.Typer(help=HELP, no_args_is_help=True)
POLL_SEC = 5.0


@app.callback(help=HELP)
def group() -> None:
    pass


@app.command("install")
def install_command(
    image: Annotated[
        str | None, typer.Option(help="llmtrain image. Default: the installed one, else the default of launch.image.")
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
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Install a small pod that replaces pods on unreachable nodes (as `recover` does) and notifies a webhook when a run
    finishes, fails or is recovered. Run it again to change options; the others keep their values."""
    from llmtrain.operate.guard.install import GuardOptions, install_guard

    cluster = connect(kubeconfig, context)
    options = GuardOptions(image, after, webhook, pull_policy, pull_secret)
    installed = install_guard(cluster, namespace or cluster.namespace, options)
    show(json_, asdict(installed), installed.text)


@app.command("remove")
def remove_command(
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Remove the guard of a namespace with its ServiceAccount and Role. Runs are not affected."""
    from llmtrain.launch.guard import remove

    cluster = connect(kubeconfig, context)
    namespace = namespace or cluster.namespace
    is_removed = remove(cluster, namespace)
    text = f"Guard removed from namespace {namespace}." if is_removed else f"Namespace {namespace} has no guard."
    show(json_, {"namespace": namespace, "removed": is_removed}, text)


@app.command("status")
def status_command(
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Show whether a namespace has a guard, its settings and its latest log lines."""
    from llmtrain.operate.guard.status import guard_status

    cluster = connect(kubeconfig, context)
    namespace = namespace or cluster.namespace
    status = guard_status(cluster, namespace)
    if status is None:
        remedy = f"Install one: llmtrain guard install{cluster.place(namespace)}"
        show(json_, {"namespace": namespace, "installed": False}, f"Namespace {namespace} has no guard. {remedy}")
        return
    value = {"namespace": namespace, "installed": True, **asdict(status)}
    show(json_, value, f"Namespace {namespace}: {status.text}")


@app.command("watch", hidden=True)
def watch_command(
    after: Annotated[float, typer.Option(min=0)] = 60.0,
    _with_logs: Annotated[
        bool, typer.Option("--with-logs", help="Ignored: passed by a guard that the first version installed.")
    ] = False,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Watch the runs of a namespace until SIGTERM. The guard's pod runs this command."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.launch.guard import WATCHING
    from llmtrain.logs import log, setup_logging
    from llmtrain.operate.guard.watch import Guard, watch

    setup_logging(LoggingSection())
    cluster = connect(kubeconfig, context)
    namespace = namespace or cluster.namespace
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    guard = Guard(cluster, namespace, after, os.environ.get(WEBHOOK))
    log("GUARD", f"watching namespace {namespace}: pods are replaced once their node has been NotReady for {after:g} s")
    is_in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    watch(guard, POLL_SEC, lambda: Path(WATCHING).touch() if is_in_pod else None, stop.wait)
