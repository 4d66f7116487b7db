"""Manifests of the guard: a Deployment with one small pod, its ServiceAccount and Role, and the Secret of a webhook.
watch.py is the program in the pod, and install.py creates the objects."""

import base64
from dataclasses import dataclass, field

from llmtrain.core.env import WEBHOOK
from llmtrain.kubernetes.labels import (
    AFTER_ANNOTATION,
    COMMON_LABELS,
    GUARD_LABELS,
    INSTALLED_ANNOTATION,
)
from llmtrain.launch.job import Manifest
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
