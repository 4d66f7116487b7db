"""llmtrain guard: keep the runs of a namespace alive while nobody watches."""

import os
import signal
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.env import WEBHOOK
from llmtrain.errors import UsageError

HELP = "Keep the runs of a namespace alive while nobody watches."
app = typer.Typer(help=HELP, no_args_is_help=True)
EVERY_SEC = 5.0
USUAL_AFTER_SEC = 60.0


@app.callback(help=HELP)
def group() -> None:
    pass


@app.command("install")
def install_command(
    image: Annotated[
        str | None, typer.Option(help="Image of llmtrain. Default: the one installed, else that of launch.image.")
    ] = None,
    after: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that a machine must have been silent; at first 60."),
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(
            envvar=WEBHOOK,
            help="URL that gets a line of JSON for each event; kept in a Secret. '' for none.",
        ),
    ] = None,
    with_logs: Annotated[
        bool | None,
        typer.Option(
            "--with-logs/--without-logs",
            help="May read logs too: only they tell when a StatefulSet's run has ended.",
            show_default=False,
        ),
    ] = None,
    pull_policy: Annotated[
        str | None,
        typer.Option("--image-pull-policy", help="IfNotPresent (unless said otherwise), Always or Never."),
    ] = None,
    pull_secret: Annotated[
        list[str] | None, typer.Option("--image-pull-secret", help="Secret of a private registry.", show_default=False)
    ] = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Put one small pod into a namespace that gives up pods on lost machines (as `recover` does), and tells a webhook
    when a run has finished, failed or been recovered. Again with other options: those are changed."""
    from llmtrain.config.launch import LaunchSection
    from llmtrain.launch.guard import GuardPlan, install
    from llmtrain.operate.guard.status import guard_status, wait_until_watching

    if webhook and not _is_address(webhook):
        raise UsageError("--webhook is no http or https address.")
    if pull_policy not in (None, "IfNotPresent", "Always", "Never"):
        raise UsageError(f"--image-pull-policy '{pull_policy}' is unknown.", known=["IfNotPresent", "Always", "Never"])
    cluster = connect(kubeconfig, context)
    where = namespace or cluster.namespace
    before = guard_status(cluster, where)
    keeps_webhook = webhook is None and before is not None and before.webhook
    plan = GuardPlan(
        namespace=where,
        image=image or (before.image if before else LaunchSection().image),
        image_pull_policy=pull_policy or (before.image_pull_policy if before else "IfNotPresent"),
        after_sec=after if after is not None else before.after_sec if before else USUAL_AFTER_SEC,
        installed_at=datetime.now(UTC).isoformat(),
        webhook=webhook or None,
        keeps_webhook=keeps_webhook,
        with_logs=with_logs if with_logs is not None else before is not None and before.with_logs,
        image_pull_secrets=pull_secret if pull_secret is not None else before.image_pull_secrets if before else [],
    )
    done = install(cluster, plan)
    wait_until_watching(cluster, where)
    has_webhook = bool(webhook) or keeps_webhook
    value = {
        "namespace": where,
        "done": done,
        "image": plan.image,
        "after_sec": plan.after_sec,
        "with_logs": plan.with_logs,
        "webhook": has_webhook,
    }
    text = (
        f"The guard of namespace {where} is {done}: pods are given up {plan.after_sec:g} s after their machine went "
        f"silent, {'a webhook is told' if has_webhook else 'no webhook is told'}."
    )
    show(json_, value, text)


def _is_address(url: str) -> bool:
    """One that a request can be made to."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises where it is no number
    except ValueError:
        return False
    is_clean = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_clean


@app.command("remove")
def remove_command(
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Take the guard out of a namespace, with its account and its rights. Runs are not touched."""
    from llmtrain.launch.guard import remove

    cluster = connect(kubeconfig, context)
    where = namespace or cluster.namespace
    was_there = remove(cluster, where)
    text = f"The guard of namespace {where} is removed." if was_there else f"Namespace {where} has no guard."
    show(json_, {"namespace": where, "removed": was_there}, text)


@app.command("status")
def status_command(
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Whether a namespace has a guard, how it does, and what it said last."""
    from dataclasses import asdict

    from llmtrain.operate.guard.status import guard_status

    cluster = connect(kubeconfig, context)
    where = namespace or cluster.namespace
    status = guard_status(cluster, where)
    if status is None:
        hint = f"Install one: llmtrain guard install{cluster.place(where)}"
        show(json_, {"namespace": where, "installed": False}, f"Namespace {where} has no guard. {hint}")
        return
    show(json_, {"namespace": where, "installed": True, **asdict(status)}, f"Namespace {where}: {status.text}")


@app.command("watch", hidden=True)
def watch_command(
    after: Annotated[float, typer.Option(min=0)] = USUAL_AFTER_SEC,
    with_logs: Annotated[bool, typer.Option("--with-logs")] = False,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """What the guard's pod runs: watch the runs of a namespace until told to stop."""
    from llmtrain.config.logging import LoggingSection
    from llmtrain.launch.guard import WATCHING
    from llmtrain.logs import log, setup_logging
    from llmtrain.operate.guard.watch import Guard, watch

    setup_logging(LoggingSection())
    cluster = connect(kubeconfig, context)
    where = namespace or cluster.namespace
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    guard = Guard(cluster, where, after, os.environ.get(WEBHOOK), with_logs)
    log("GUARD", f"watches namespace {where}: pods are given up {after:g} s after their machine went silent")
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    watch(guard, EVERY_SEC, lambda: Path(WATCHING).touch() if in_pod else None, told.wait)
