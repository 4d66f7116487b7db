"""The pod template of all workloads. It passes Pod Security `restricted` unless the config says otherwise."""

from collections.abc import Sequence
from typing import Any

from llmtrain.config.launch import DataVolumeSection, LaunchSection
from llmtrain.env import (
    CODE_DIR,
    CODE_HASH,
    EXIT_CODES,
    HOLD_SCRIPT,
    LAUNCH,
    NODE_NAME,
    PREFETCHED,
    RUN_DIR,
    TOKEN_CACHE,
)
from llmtrain.launch.code_map import code_volume
from llmtrain.launch.plan import METRICS_PORT, JobPlan, Manifest
from llmtrain.launch.pod_patch import patched
from llmtrain.launch.pod_scripts import script_text
from llmtrain.launch.work import CODE_PATH, CONFIG_DIR, CONFIG_FILE, WORK_DIR
from llmtrain.tracking.prometheus import PATH as METRICS_PATH

USER_ID = 1000  # the user of docker/Dockerfile; other images need not have it
GRACE_MARGIN_SEC = 60  # after the processes have ended: to collect exit codes and write the report
CACHE_DIR = "/cache"
PREFETCH_REPORT = f"{CACHE_DIR}/prefetch.json"
# Everything that libraries write outside the volumes, in two emptyDirs.
WRITABLE = {
    "HOME": CACHE_DIR,
    "USER": "llmtrain",  # else getpass looks up the uid in /etc/passwd, where it may be missing
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": f"{CACHE_DIR}/xdg",
    "HF_HOME": f"{CACHE_DIR}/huggingface",
    "TIKTOKEN_CACHE_DIR": f"{CACHE_DIR}/tiktoken",
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_DIR}/inductor",
    "TRITON_CACHE_DIR": f"{CACHE_DIR}/triton",
    "PYTHONUNBUFFERED": "1",
}

# Sidecars of a service mesh break connections between ranks; old Istio reads the annotation, new Istio the label.
NO_SIDECAR = {"sidecar.istio.io/inject": "false"}
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# For images with their own user. fsGroup still makes the volumes writable for it.
BASELINE_POD_SECURITY: Manifest = {
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def pod_security(launch: LaunchSection) -> Manifest:
    level = {"restricted": POD_SECURITY, "baseline": BASELINE_POD_SECURITY, "none": {}}[launch.security]
    ids = {"runAsUser": launch.run_as_user, "runAsGroup": launch.run_as_group, "fsGroup": launch.fs_group}
    return {**level, **without_empty(ids)}


def container_security(launch: LaunchSection, capabilities: Sequence[str] = ()) -> Manifest:
    """The securityContext field of a container, if any."""
    context = CONTAINER_SECURITY if launch.security == "restricted" else {}
    if capabilities:
        context = {**context, "capabilities": {**context.get("capabilities", {}), "add": list(capabilities)}}
    return {"securityContext": context} if context else {}


def pod_template(
    plan: JobPlan,
    restart_policy: str | None,
    env: list[Manifest] | None = None,
    port_name: str = "rendezvous",
    subdomain: str | None = None,
) -> Manifest:
    """`env`: additional variables of the workload; `restart_policy` None: the operator sets it."""
    launch = plan.launch
    spec: Manifest = {
        "restartPolicy": restart_policy,
        "subdomain": subdomain,
        "terminationGracePeriodSeconds": launch.grace_period_sec + GRACE_MARGIN_SEC,
        "serviceAccountName": launch.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if launch.host_network else {}),
        "runtimeClassName": launch.runtime_class,
        "schedulerName": launch.scheduler_name,
        "securityContext": pod_security(launch),
        "imagePullSecrets": [{"name": name} for name in launch.image_pull_secrets],
        "priorityClassName": launch.priority_class,
        "nodeSelector": dict(launch.node_selector),
        "tolerations": list(launch.tolerations),
        "affinity": dict(launch.affinity),
        "topologySpreadConstraints": _spread(plan),
        "initContainers": [_prefetch(plan)] if plan.is_fetching else [],
        "containers": [_container(plan, env or [], port_name)],
        "volumes": _volumes(plan),
    }
    meta = {
        "labels": {**plan.labels, **NO_SIDECAR, **launch.labels},
        "annotations": {**NO_SIDECAR, **_scrape_annotations(plan), **launch.annotations},
    }
    return patched({"metadata": meta, "spec": without_empty(spec)}, plan)


def without_empty(values: Manifest) -> Manifest:
    """Drop fields that are None or empty, but not false and 0."""
    return {key: value for key, value in values.items() if value is not None and value != [] and value != {}}


def env_from_label(name: str, label: str) -> Manifest:
    """An environment variable with the value of a pod label (downward API)."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def exit_codes(platform: str) -> Manifest:
    """Tells `llmtrain node` to translate exit codes for a platform that interprets them differently."""
    return {"name": EXIT_CODES, "value": platform}


def _container(plan: JobPlan, env: list[Manifest], port_name: str) -> Manifest:
    launch = plan.launch
    return {
        "name": plan.container,
        "image": launch.image,
        "imagePullPolicy": launch.image_pull_policy,
        "command": plan.command,  # exec form: the trainer is PID 1 and receives signals
        "env": [*_env(plan), *env],
        **_env_from(plan),
        "ports": [{"name": port_name, "containerPort": plan.master_port}, *_metrics_port(plan)],
        "resources": _resources(plan),
        **container_security(launch, launch.capabilities),
        "volumeMounts": _mounts(plan),
    }


def _metrics_port(plan: JobPlan) -> list[Manifest]:
    return [{"name": METRICS_PORT, "containerPort": plan.metrics_port}] if plan.metrics_port else []


def _scrape_annotations(plan: JobPlan) -> dict[str, str]:
    """For a Prometheus that finds pods by annotations. Of a run with several pods only pod 0 serves metrics."""
    if not plan.metrics_port:
        return {}
    values = {"scrape": "true", "port": str(plan.metrics_port), "path": METRICS_PATH}
    return {f"prometheus.io/{name}": value for name, value in values.items()}


def _prefetch(plan: JobPlan) -> Manifest:
    """Downloads models and data before training starts, so that training needs neither the hub nor a token."""
    options = ["--config", f"{CONFIG_DIR}/{CONFIG_FILE}", "--report", PREFETCH_REPORT]
    return {
        "name": "prefetch",
        "image": plan.launch.image,
        "imagePullPolicy": plan.launch.image_pull_policy,
        "command": ["python", "-m", "llmtrain", "prefetch", *options],
        "env": _env(plan, is_prefetch=True),
        **_env_from(plan),
        "resources": _resources(plan),
        **container_security(plan.launch),
        "volumeMounts": _mounts(plan),
    }


def _env_from(plan: JobPlan) -> Manifest:
    names = plan.launch.env_secrets
    return {"envFrom": [{"secretRef": {"name": name}} for name in names]} if names else {}


def _env(plan: JobPlan, is_prefetch: bool = False) -> list[Manifest]:
    launch, is_held = plan.launch, plan.work.mode == "hold"
    # Training does not need the hub after the prefetch. In held pods users may want other models than the config's.
    uses_hub = is_prefetch or is_held or not plan.is_fetching
    # On the volume, tokens outlive the pod, and the next run finds them.
    plain = {**WRITABLE, LAUNCH: plan.launch_id, TOKEN_CACHE: f"{plan.mounts['runs']}/.cache/llmtrain"}
    plain |= {"MLFLOW_TRACKING_URI": plan.tracking_uri} if plan.tracking_uri else {}
    models = launch.models_volume
    if "models" in launch.volumes and not models.read_only:  # downloaded once for all pods
        plain["HF_HOME"] = f"{models.mount_path}/huggingface"
    plain |= {} if uses_hub else {"HF_HUB_OFFLINE": "1"}
    plain |= {PREFETCHED: PREFETCH_REPORT} if plan.is_fetching and not is_prefetch else {}
    if is_held and not is_prefetch:
        plain[HOLD_SCRIPT] = script_text("hold.py")
    if plan.work.mode in ("hold", "command") and not is_prefetch:
        plain[RUN_DIR] = f"{plan.mounts['runs']}/{plan.run_id}"
    plain |= launch.env
    if plan.code:
        plain |= {CODE_DIR: CODE_PATH, CODE_HASH: plan.code.sha256}
        plain["PYTHONPATH"] = ":".join(filter(None, (CODE_PATH, launch.env.get("PYTHONPATH"))))
    rows: list[Manifest] = [{"name": name, "value": value} for name, value in plain.items()]
    rows.append({"name": NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    token = launch.hf_token_secret
    if token.name and (is_prefetch or plan.work.mode in ("hold", "command")):  # only where downloads happen
        rows.append(
            {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}},
        )
    return rows


def _resources(plan: JobPlan) -> Manifest:
    """Requests equal limits (QoS class Guaranteed): the pod is evicted last."""
    resources = plan.launch.resources
    amounts: dict[str, Any] = {"cpu": resources.cpu, "memory": resources.memory}
    if resources.ephemeral_storage:
        amounts["ephemeral-storage"] = resources.ephemeral_storage
    if resources.gpus:
        amounts[resources.gpu_resource] = str(resources.gpus)
    amounts |= resources.extra
    return {"requests": amounts, "limits": amounts}


def _mounts(plan: JobPlan) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "config", "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": CACHE_DIR},
        {"name": "shm", "mountPath": "/dev/shm"},
        *([{"name": "work", "mountPath": WORK_DIR}] if plan.work.mode == "hold" else []),
        *([{"name": "code", "mountPath": CODE_PATH, "readOnly": True}] if plan.code else []),
    ]
    for name, volume in plan.launch.volumes.items():
        is_read_only = isinstance(volume, DataVolumeSection) and volume.read_only
        mounts.append({"name": name, "mountPath": plan.mounts[name]} | ({"readOnly": True} if is_read_only else {}))
    return [*mounts, *plan.launch.extra_mounts]


def _volumes(plan: JobPlan) -> list[Manifest]:
    return [
        {"name": "config", "configMap": {"name": plan.config_map}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": plan.launch.resources.shm_size}},
        *([{"name": "work", "emptyDir": {}}] if plan.work.mode == "hold" else []),
        *([{"name": "code", "configMap": code_volume(plan)}] if plan.code else []),
        *({"name": name, "persistentVolumeClaim": {"claimName": plan.claim(name)}} for name in plan.launch.volumes),
        *plan.launch.extra_volumes,
    ]


def _spread(plan: JobPlan) -> list[Manifest]:
    spread = plan.launch.topology_spread
    if isinstance(spread, bool):
        prefer = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        spread = [prefer] if spread and plan.nodes > 1 else []
    return [{**row, "labelSelector": row.get("labelSelector", {"matchLabels": plan.selector})} for row in spread]
