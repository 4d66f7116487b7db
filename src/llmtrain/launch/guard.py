"""The guard of a namespace: one small pod that keeps its runs alive while nobody watches. What it does is in
operate/guard.py; here are its manifests, and the way to the cluster and away again."""

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
    LOGS_ANNOTATION,
    has_labels,
)
from llmtrain.launch.objects import find_object, undo_on_error
from llmtrain.launch.plan import Manifest
from llmtrain.launch.pod import CONTAINER_SECURITY, NO_SIDECAR, POD_SECURITY

NAME = "llmtrain-guard"
LABELS = {**COMMON_LABELS, **GUARD_LABELS}
WATCHING = "/tmp/watching"  # there once the guard has seen the pods
MOVES_SEC = 10  # after its own machine was lost; Kubernetes' default is five minutes


@dataclass(frozen=True)
class GuardPlan:
    namespace: str
    image: str
    image_pull_policy: str
    after_sec: float
    installed_at: str
    webhook: str | None = None
    """None: none, or as before."""
    keeps_webhook: bool = False
    """The one that is installed stays."""
    with_logs: bool = False
    image_pull_secrets: list[str] = field(default_factory=list)


def render_guard(plan: GuardPlan) -> list[Manifest]:
    """In the order in which they are applied."""
    secret = [_secret(plan)] if plan.webhook else []
    return [*secret, _account(plan), _role(plan), _binding(plan), _deployment(plan)]


def _object(plan: GuardPlan, api_version: str, kind: str, **more: object) -> Manifest:
    meta = {"name": NAME, "namespace": plan.namespace, "labels": LABELS}
    return {"apiVersion": api_version, "kind": kind, "metadata": meta, **more}


def _secret(plan: GuardPlan) -> Manifest:
    """The address of a webhook is a password more often than not."""
    data = {"webhook": base64.b64encode(str(plan.webhook).encode()).decode()}
    return _object(plan, "v1", "Secret", type="Opaque", data=data)


def _account(plan: GuardPlan) -> Manifest:
    return _object(plan, "v1", "ServiceAccount", automountServiceAccountToken=False)


def _role(plan: GuardPlan) -> Manifest:
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "delete"]},
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    if plan.with_logs:
        rules.append({"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]})
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
    gone = [
        {
            "key": f"node.kubernetes.io/{what}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": MOVES_SEC,
        }
        for what in ("not-ready", "unreachable")
    ]
    pod = {
        "serviceAccountName": NAME,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": POD_SECURITY,
        "imagePullSecrets": [{"name": name} for name in plan.image_pull_secrets],
        "tolerations": gone,
        "containers": [_container(plan)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    # Whatever has changed, also what the Secret holds: the pod is made anew.
    notes = {**NO_SIDECAR, INSTALLED_ANNOTATION: plan.installed_at}
    template = {"metadata": {"labels": {**LABELS, **NO_SIDECAR}, "annotations": notes}, "spec": pod}
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},  # two would tell everything twice
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": GUARD_LABELS},
        "template": template,
    }
    made = _object(plan, "apps/v1", "Deployment", spec=spec)
    made["metadata"] = {
        **made["metadata"],
        "annotations": {AFTER_ANNOTATION: f"{plan.after_sec:g}", LOGS_ANNOTATION: str(plan.with_logs).lower()},
    }
    return made


def _container(plan: GuardPlan) -> Manifest:
    env: list[Manifest] = [{"name": "HOME", "value": "/tmp"}, {"name": "PYTHONUNBUFFERED", "value": "1"}]
    if plan.webhook or plan.keeps_webhook:
        env.append({"name": WEBHOOK, "valueFrom": {"secretKeyRef": {"name": NAME, "key": "webhook"}}})
    return {
        "name": "guard",
        "image": plan.image,
        "imagePullPolicy": plan.image_pull_policy,
        "command": [
            *("python", "-m", "llmtrain", "guard", "watch", "--after", f"{plan.after_sec:g}"),
            *(["--with-logs"] if plan.with_logs else []),
        ],
        "env": env,
        "resources": {"requests": {"cpu": "10m", "memory": "128Mi"}, "limits": {"cpu": "500m", "memory": "256Mi"}},
        "readinessProbe": {"exec": {"command": ["test", "-e", WATCHING]}, "periodSeconds": 2},
        # It touches the file each time it looks: one that hangs is started again.
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f'test -n "$(find {WATCHING} -mmin -3)"']},
            "initialDelaySeconds": 180,
            "periodSeconds": 60,
        },
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def install(cluster: Cluster, plan: GuardPlan) -> str:
    """Make what is missing and change what is there: `installed`, or `changed`. Objects of others are left alone."""
    manifests = render_guard(plan)
    there = [find_object(cluster, manifest) for manifest in manifests]
    for found in there:
        if found is not None and not has_labels(found, GUARD_LABELS):
            raise UsageError(
                f"{found['kind']} {NAME} in namespace {plan.namespace} is there already, and llmtrain did not make it.",
                remedy="Nothing was changed. Remove it if it is yours.",
            )
    with undo_on_error() as undo:
        for manifest, found in zip(manifests, there, strict=True):
            if found is None:
                undo.append(partial(_remove, cluster, plan.namespace, manifest["apiVersion"], manifest["kind"]))
                cluster.create(manifest)
            elif manifest["kind"] != "RoleBinding":  # whom it binds to what never changes
                cluster.patch(manifest["apiVersion"], manifest["kind"], NAME, plan.namespace, manifest)
    if not plan.webhook and not plan.keeps_webhook:
        _remove(cluster, plan.namespace, "v1", "Secret")
    return "installed" if there[-1] is None else "changed"


def remove(cluster: Cluster, namespace: str) -> bool:
    """False where there was none."""
    gone = [
        _remove(cluster, namespace, manifest["apiVersion"], manifest["kind"])
        for manifest in reversed(render_guard(GuardPlan(namespace, "", "", 0.0, "", webhook="-")))
    ]
    return gone[0]


def _remove(cluster: Cluster, namespace: str, api_version: str, kind: str) -> bool:
    found = cluster.get(api_version, kind, NAME, namespace)
    return found is not None and has_labels(found, GUARD_LABELS) and cluster.delete(api_version, kind, NAME, namespace)
