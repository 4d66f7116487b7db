"""Manifests, installation and removal of the guard, a small Deployment that recovers the runs of a namespace.
operate/guard/watch.py is the program that it runs."""

import base64
from dataclasses import dataclass, field
from functools import partial

from llmtrain.env import WEBHOOK
from llmtrain.errors import UsageError
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.labels import (
    AFTER_ANNOTATION,
    COMMON_LABELS,
    GUARD_LABELS,
    INSTALLED_ANNOTATION,
    has_labels,
)
from llmtrain.launch.objects import find_object, undo_on_error
from llmtrain.launch.plan import Manifest
from llmtrain.launch.pod import CONTAINER_SECURITY, NO_SIDECAR, POD_SECURITY

NAME = "llmtrain-guard"
LABELS = {**COMMON_LABELS, **GUARD_LABELS}
WATCHING = "/tmp/watching"  # touched after each look at the pods
EVICTION_SEC = 10  # after its own node became unreachable; the default of Kubernetes is five minutes


@dataclass(frozen=True)
class GuardPlan:
    namespace: str
    image: str
    image_pull_policy: str
    after_sec: float
    installed_at: str
    webhook: str | None = None
    """None: no webhook, or the installed one (`keeps_webhook`)."""
    keeps_webhook: bool = False
    """Keep the installed webhook."""
    image_pull_secrets: list[str] = field(default_factory=list)


def render_guard(plan: GuardPlan) -> list[Manifest]:
    """Manifests in the order of creation."""
    secret = [_secret(plan)] if plan.webhook else []
    return [*secret, _account(plan), _role(plan), _binding(plan), _deployment(plan)]


def _object(plan: GuardPlan, api_version: str, kind: str, **more: object) -> Manifest:
    meta = {"name": NAME, "namespace": plan.namespace, "labels": LABELS}
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **more}


def _secret(plan: GuardPlan) -> Manifest:
    """The URL of a webhook usually contains a credential."""
    data = {"webhook": base64.b64encode(str(plan.webhook).encode()).decode()}
    return _object(plan, "v1", "Secret", type="Opaque", data=data)


def _account(plan: GuardPlan) -> Manifest:
    return _object(plan, "v1", "ServiceAccount", automountServiceAccountToken=False)


def _role(plan: GuardPlan) -> Manifest:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    return _object(plan, "rbac.authorization.k8s.io/v1", "Role", rules=rules)


def _binding(plan: GuardPlan) -> Manifest:
    return _object(
        plan,
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME},
        subjects=[{"kind": "ServiceAccount", "name": NAME, "namespace": plan.namespace}],
    )


def _deployment(plan: GuardPlan) -> Manifest:
    tolerations = [
        {
            "key": f"node.kubernetes.io/{taint}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": EVICTION_SEC,
        }
        for taint in ("not-ready", "unreachable")
    ]
    pod = {
        "serviceAccountName": NAME,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": POD_SECURITY,
        "imagePullSecrets": [{"name": name} for name in plan.image_pull_secrets],
        "tolerations": tolerations,
        "containers": [_container(plan)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    # A new timestamp recreates the pod after every change, also of the Secret.
    annotations = {**NO_SIDECAR, INSTALLED_ANNOTATION: plan.installed_at}
    template = {"metadata": {"labels": {**LABELS, **NO_SIDECAR}, "annotations": annotations}, "spec": pod}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two pods would send every notification twice
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": GUARD_LABELS},
        "template": template,
    }
    deployment = _object(plan, "apps/v1", "Deployment", spec=spec)
    deployment["metadata"] = {
        **deployment["metadata"],
        "annotations": {AFTER_ANNOTATION: f"{plan.after_sec:g}"},
    }
    return deployment


def _container(plan: GuardPlan) -> Manifest:
    env: list[Manifest] = [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}]
    if plan.webhook or plan.keeps_webhook:
        env.append({"name": WEBHOOK, "valueFrom": {"secretKeyRef": {"name": NAME, "key": "webhook"}}})
    return {
        "name": "guard",
        "image": plan.image,
        "imagePullPolicy": plan.image_pull_policy,
        "command": ["python", "-m", "llmtrain", "guard", "watch", "--after", f"{plan.after_sec:g}"],
        "env": env,
        "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}},
        "readinessProbe": {"exec": {"command": ["test", "-e", WATCHING]}, "periodSeconds": 2},
        # A guard that hangs stops touching the file, and is restarted.
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f'test -n "$(find {WATCHING} -mmin -3)"']},
            "initialDelaySeconds": 180,
            "periodSeconds": 60,
        },
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def install(cluster: Cluster, plan: GuardPlan) -> str:
    """Create or update the guard: `installed` or `changed`. Objects that llmtrain did not create are refused."""
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


def remove(cluster: Cluster, namespace: str) -> bool:
    """False if no guard was installed."""
    deleted = [
        _remove(cluster, namespace, manifest["apiVersion"], manifest["kind"])
        for manifest in reversed(render_guard(GuardPlan(namespace, "", "", 0.0, "", webhook="-")))
    ]
    return deleted[0]


def _remove(cluster: Cluster, namespace: str, api_version: str, kind: str) -> bool:
    found = cluster.get(api_version, kind, NAME, namespace)
    return found is not None and has_labels(found, GUARD_LABELS) and cluster.delete(api_version, kind, NAME, namespace)
