"""Installing and removing the guard. Options that are not passed keep the values of an installed guard."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from urllib.parse import urlsplit

from llmtrain.errors import UsageError
from llmtrain.guard.manifests import NAME, GuardPlan, render_guard
from llmtrain.guard.status import GuardStatus, guard_status, wait_until_watching
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.labels import GUARD_LABELS, has_labels
from llmtrain.launch.image import missing_image
from llmtrain.launch.objects import find_object, undo_on_error

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
    done = apply_plan(cluster, plan)
    wait_until_watching(cluster, namespace)
    has_webhook = bool(plan.webhook) or plan.keeps_webhook
    return InstalledGuard(namespace, done, plan.image, plan.after_sec, has_webhook)


def plan_guard(namespace: str, options: GuardOptions, installed: GuardStatus | None) -> GuardPlan:
    image = options.image
    if installed is not None:
        image = image or installed.image
    if not image:
        raise missing_image(
            "A new guard needs --image, an image with llmtrain that the cluster can pull.", can_build=False
        )
    plan = GuardPlan(
        namespace=namespace,
        image=image,
        image_pull_policy=PULL_POLICIES[0],
        after_sec=DEFAULT_AFTER_SEC,
        installed_at=datetime.now(UTC).isoformat(),
        webhook=options.webhook or None,
    )
    if installed is not None:
        plan = replace(
            plan,
            image_pull_policy=installed.image_pull_policy,
            after_sec=installed.after_sec,
            keeps_webhook=options.webhook is None and installed.webhook,
            image_pull_secrets=installed.image_pull_secrets,
        )
    if options.pull_policy:
        plan = replace(plan, image_pull_policy=options.pull_policy)
    if options.after_sec is not None:
        plan = replace(plan, after_sec=options.after_sec)
    if options.pull_secrets is not None:
        plan = replace(plan, image_pull_secrets=options.pull_secrets)
    return plan


def apply_plan(cluster: Cluster, plan: GuardPlan) -> str:
    """Create or update the objects of the guard, and return `installed` or `changed`. Objects that llmtrain did not
    create are refused."""
    manifests = render_guard(plan)
    existing = [find_object(cluster, manifest) for manifest in manifests]
    for found in existing:
        if found is not None and not has_labels(found, GUARD_LABELS):
            raise UsageError(
                f"{found['kind']} {NAME} already exists in namespace {plan.namespace} and was not created by llmtrain.",
                remedy="Nothing was changed. Delete it if it is yours.",
            )
    with undo_on_error() as undo:
        for manifest, found in zip(manifests, existing, strict=True):
            if found is None:
                undo.append(partial(_remove, cluster, plan.namespace, manifest["apiVersion"], manifest["kind"]))
                cluster.create(manifest)
            elif manifest["kind"] != "RoleBinding":  # it never changes
                cluster.patch(manifest["apiVersion"], manifest["kind"], NAME, plan.namespace, manifest)
    if not plan.webhook and not plan.keeps_webhook:
        _remove(cluster, plan.namespace, "v1", "Secret")
    return "installed" if existing[-1] is None else "changed"


def remove_guard(cluster: Cluster, namespace: str) -> bool:
    """Delete the objects of the guard. False if no guard was installed."""
    deleted = [
        _remove(cluster, namespace, manifest["apiVersion"], manifest["kind"])
        for manifest in reversed(render_guard(GuardPlan(namespace, "", "", 0.0, "", webhook="-")))
    ]
    return deleted[0]


def _remove(cluster: Cluster, namespace: str, api_version: str, kind: str) -> bool:
    found = cluster.get(api_version, kind, NAME, namespace)
    return found is not None and has_labels(found, GUARD_LABELS) and cluster.delete(api_version, kind, NAME, namespace)


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
