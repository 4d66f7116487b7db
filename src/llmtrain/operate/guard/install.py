"""Installing the guard. Options that are not passed keep the values of an installed guard."""

from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlsplit

from llmtrain.config.launch import LaunchSection
from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch.guard import GuardPlan, install
from llmtrain.operate.guard.status import GuardStatus, guard_status, wait_until_watching

DEFAULT_AFTER_SEC = 60.0
PULL_POLICIES = ("IfNotPresent", "Always", "Never")


@dataclass(frozen=True)
class GuardOptions:
    """None keeps the installed value, or the default for a new guard."""

    image: str | None = None
    after_sec: float | None = None
    webhook: str | None = None
    """An empty string removes the webhook."""
    pull_policy: str | None = None
    pull_secrets: list[str] | None = None


@dataclass(frozen=True)
class InstalledGuard:
    namespace: str
    done: str
    """installed or changed"""
    image: str
    after_sec: float
    webhook: bool

    @property
    def text(self) -> str:
        webhook = "events are posted to the webhook" if self.webhook else "no webhook is configured"
        return (
            f"Guard {self.done} in namespace {self.namespace}: it replaces pods whose node has been NotReady for "
            f"{self.after_sec:g} s; {webhook}."
        )


def install_guard(cluster: Cluster, namespace: str, options: GuardOptions) -> InstalledGuard:
    """Install or change the guard and wait until its pod is ready."""
    _check(options)
    plan = plan_guard(namespace, options, guard_status(cluster, namespace))
    done = install(cluster, plan)
    wait_until_watching(cluster, namespace)
    has_webhook = bool(plan.webhook) or plan.keeps_webhook
    return InstalledGuard(namespace, done, plan.image, plan.after_sec, has_webhook)


def plan_guard(namespace: str, options: GuardOptions, installed: GuardStatus | None) -> GuardPlan:
    image, policy, after_sec = LaunchSection().image, PULL_POLICIES[0], DEFAULT_AFTER_SEC
    pull_secrets: list[str] = []
    if installed is not None:
        image, policy, after_sec = installed.image, installed.image_pull_policy, installed.after_sec
        pull_secrets = installed.image_pull_secrets
    return GuardPlan(
        namespace=namespace,
        image=options.image or image,
        image_pull_policy=options.pull_policy or policy,
        after_sec=after_sec if options.after_sec is None else options.after_sec,
        installed_at=datetime.now(UTC).isoformat(),
        webhook=options.webhook or None,
        keeps_webhook=options.webhook is None and installed is not None and installed.webhook,
        image_pull_secrets=pull_secrets if options.pull_secrets is None else options.pull_secrets,
    )


def _check(options: GuardOptions) -> None:
    if options.webhook and not _is_http_url(options.webhook):
        # The value is not shown: a webhook URL often contains a token.
        raise UsageError("--webhook must be an http:// or https:// URL.")
    if options.pull_policy not in (None, *PULL_POLICIES):
        raise UsageError(f"--image-pull-policy '{options.pull_policy}' is unknown.", known=PULL_POLICIES)


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError:
        return False
    is_clean = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_clean
