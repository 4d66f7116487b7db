"""The pod template of all kinds. It passes Pod Security `restricted` unless the config says otherwise."""

from collections.abc import Sequence
from typing import Any

from llmtrain.config.launch import HF_TOKEN, DataVolumeSection, LaunchSection
from llmtrain.core.env import (
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
from llmtrain.launch.job import METRICS_PORT, PREFETCH, JobPlan, Manifest
from llmtrain.launch.pod_patch import patched
from llmtrain.launch.pod_scripts import script_text
from llmtrain.launch.pod_task import CODE_PATH, CONFIG_DIR, CONFIG_FILE, WORK_DIR
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
    context: Manifest = {}
    if launch.security == "restricted":
        context |= CONTAINER_SECURITY
    if capabilities:
        context["capabilities"] = {**context.get("capabilities", {}), "add": list(capabilities)}
    return without_empty({"securityContext": context})


def pod_template(
    plan: JobPlan,
    restart_policy: str | None,
    env: list[Manifest] | None = None,
    port_name: str = "rendezvous",
    subdomain: str | None = None,
) -> Manifest:
    """`env`: additional variables of the kind; `restart_policy` None: the operator sets it."""
    launch = plan.launch
    dns_policy = None
    init_containers = []
    if launch.host_network:  # with the default policy, such a pod cannot resolve the names of Services
        dns_policy = "ClusterFirstWithHostNet"
    if plan.is_fetching:
        init_containers = [_prefetch(plan)]
    spec: Manifest = {
        "restartPolicy": restart_policy,
        "subdomain": subdomain,
        "terminationGracePeriodSeconds": launch.grace_period_sec + GRACE_MARGIN_SEC,
        "serviceAccountName": launch.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": launch.host_network or None,
        "dnsPolicy": dns_policy,
        "runtimeClassName": launch.runtime_class,
        "schedulerName": launch.scheduler_name,
        "securityContext": pod_security(launch),
        "imagePullSecrets": [{"name": name} for name in launch.image_pull_secrets],
        "priorityClassName": launch.priority_class,
        "nodeSelector": dict(launch.node_selector),
        "tolerations": list(launch.tolerations),
        "affinity": dict(launch.affinity),
        "topologySpreadConstraints": _spread(plan),
        "initContainers": init_containers,
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
    if not plan.metrics_port:
        return []
    return [{"name": METRICS_PORT, "containerPort": plan.metrics_port}]


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
        "name": PREFETCH,
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
    return without_empty({"envFrom": [{"secretRef": {"name": name}} for name in plan.launch.env_secrets]})


def _env(plan: JobPlan, is_prefetch: bool = False) -> list[Manifest]:
    """Variables of the trainer, or of the init container that downloads models and data."""
    values = {**WRITABLE, LAUNCH: plan.launch_id, **_volume_variables(plan)}
    if plan.tracking_uri:
        values["MLFLOW_TRACKING_URI"] = plan.tracking_uri
    if not is_prefetch:
        values |= _task_variables(plan)
    values |= plan.launch.env  # the user's take precedence over those above
    if plan.code:
        paths = [CODE_PATH, plan.launch.env.get("PYTHONPATH")]
        values |= {CODE_DIR: CODE_PATH, CODE_HASH: plan.code.sha256}
        values["PYTHONPATH"] = ":".join(path for path in paths if path)
    rows: list[Manifest] = [{"name": name, "value": value} for name, value in values.items()]
    rows.append({"name": NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    token = plan.launch.hf_token_secret
    has_downloads = is_prefetch or plan.task.mode in ("hold", "command")
    if token.name and has_downloads:
        variable = token.variable
        if is_prefetch:  # the downloads are ours, the variable is for the user's program
            variable = HF_TOKEN
        rows.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return rows


def _volume_variables(plan: JobPlan) -> dict[str, str]:
    """Caches on volumes, which outlive the pod."""
    values = {}
    runs = plan.mounts.get("runs")
    if runs:  # the next run finds the tokens
        values[TOKEN_CACHE] = f"{runs}/.cache/llmtrain"
    models = plan.launch.models_volume
    if "models" in plan.launch.volumes and not models.read_only:  # downloaded once for all pods
        values["HF_HOME"] = f"{models.mount_path}/huggingface"
    return values


def _task_variables(plan: JobPlan) -> dict[str, str]:
    """What the task of the trainer's container needs."""
    values = {}
    mode = plan.task.mode
    runs = plan.mounts.get("runs")
    if plan.is_fetching:
        # Training does not need the hub after the prefetch. In held pods users may want other models than the config's.
        if mode != "hold":
            values["HF_HUB_OFFLINE"] = "1"
        values[PREFETCHED] = PREFETCH_REPORT
    if mode == "hold":
        values[HOLD_SCRIPT] = script_text("hold.py")
    if runs and mode in ("hold", "command"):
        values[RUN_DIR] = f"{runs}/{plan.run_id}"
    return values


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
    ]
    if plan.task.mode == "hold":
        mounts.append({"name": "work", "mountPath": WORK_DIR})
    if plan.code:
        mounts.append({"name": "code", "mountPath": CODE_PATH, "readOnly": True})
    for name, volume in plan.launch.volumes.items():
        mount: Manifest = {"name": name, "mountPath": plan.mounts[name]}
        if isinstance(volume, DataVolumeSection) and volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    return [*mounts, *plan.launch.extra_mounts]


def _volumes(plan: JobPlan) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": plan.config_map}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": plan.launch.resources.shm_size}},
    ]
    if plan.task.mode == "hold":
        volumes.append({"name": "work", "emptyDir": {}})
    if plan.code:
        volumes.append({"name": "code", "configMap": code_volume(plan)})
    for name in plan.launch.volumes:
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": plan.claim(name)}})
    return [*volumes, *plan.launch.extra_volumes]


def _spread(plan: JobPlan) -> list[Manifest]:
    """The constraints of the config. `true` prefers one pod per node."""
    spread = plan.launch.topology_spread
    if spread is False or (spread is True and plan.nodes == 1):
        return []
    if spread is True:
        spread = [{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}]
    return [{**row, "labelSelector": row.get("labelSelector", {"matchLabels": plan.selector})} for row in spread]
