"""Configs that cannot run on a cluster, refused before anything is created."""

from collections.abc import Iterator
from typing import Any

from llmtrain.config.check_plugins import choices
from llmtrain.config.kubernetes_types import NAME_LIMIT
from llmtrain.config.launch import mount_problems
from llmtrain.config.schema import SCHEMA_VERSION, Config
from llmtrain.config.upgrade import lost_in_v2
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.env import NAMES
from llmtrain.env import CODE_DIR, CODE_HASH, EXIT_CODES, LAUNCH
from llmtrain.errors import UsageError
from llmtrain.launch.work import CODE_PATH, WORK_DIR, Work, master_port
from llmtrain.redact import has_secret, secrets_in

MIN_PORT = 1024  # a pod without capabilities cannot bind lower ones


def check_config(config: Config, work: Work, master_addr: str, has_code: bool = False) -> None:
    launch = config.launch
    _check_plugins(config)
    _check_training(config, work)
    _check_hold(config, work)
    _check_rendezvous(config, work, master_addr)
    if launch.kind == "stateful_set" and work.launcher == "torchrun":
        raise UsageError(
            "A StatefulSet restarts containers that exit, so a run that torchrun has finished would start over.",
            remedy="Use another --kind, or --launcher llmtrain.",
        )
    mounts = launch.mounts(config.output.mount_path)
    for _, problem in mount_problems(mounts):
        raise UsageError(problem)
    if has_code:
        _check_free(mounts, CODE_PATH, "--with-code uses")
    if master_port(config) < MIN_PORT:
        raise UsageError(
            f"distributed.master_port must be at least {MIN_PORT} on a cluster, got {master_port(config)}."
        )
    _check_prometheus(config)
    longest_name = f"{master_addr.partition('.')[0].removesuffix('0')}{launch.node_range[1] - 1}"
    if len(longest_name) > NAME_LIMIT:
        raise UsageError(
            f"The pod name {longest_name} exceeds {NAME_LIMIT} characters.", remedy="Set a shorter output.run_id."
        )
    reserved = {name for names in NAMES.values() for name in names} | {
        "HF_TOKEN",
        CODE_DIR,
        CODE_HASH,
        EXIT_CODES,
        LAUNCH,
    }
    conflicts = sorted(reserved.intersection(launch.env))
    if conflicts:
        raise UsageError(
            f"launch.env sets {', '.join(conflicts)}, which the launcher or the platform sets.",
            remedy="Remove it. launch.nodes, launch.processes_per_node and distributed.rendezvous apply to all pods.",
        )


def check_launch(config: Config, work: Work) -> None:
    """What is only refused before a launch: a run that is on the cluster already must stay removable."""
    check_secrets(config, work)
    launch = config.launch
    lost = lost_in_v2(config.as_dict()) if launch.image_schema == 2 else []
    if lost:
        raise UsageError(
            f"{', '.join(lost)} cannot be recorded with launch.image_schema 2, so `resume` would lose the value.",
            remedy="Use an image of this version of llmtrain and leave image_schema out, or remove the fields.",
        )
    mounts = [*launch.mounts(config.output.mount_path).values(), WORK_DIR]
    taken = [path for each in launch.extra_mounts if (path := each["mountPath"].rstrip("/")) in mounts]
    if taken:
        raise UsageError(
            f"launch.extra_mounts: {', '.join(taken)} is already used in pods.", remedy="Choose another mountPath."
        )
    may_have_gpus = launch.resources.gpus or launch.resources.extra or launch.pod_patch  # such as a resource claim
    if work.mode == "train" and config.run.device == "cuda" and not may_have_gpus:
        raise UsageError(
            "run.device is cuda, but launch.resources.gpus is 0: the pods would have no GPU.",
            remedy="Set launch.resources.gpus, for example --set launch.resources.gpus=1 (equal to "
            "launch.processes_per_node), or run.device: cpu.",
        )


def check_secrets(config: Config, work: Work) -> None:
    """Everyone who may read the namespace can read the manifests, and the config in the ConfigMap."""
    secrets = secrets_in(work.command)
    if secrets:
        raise UsageError(
            f"The command contains what looks like a secret, which the manifests would show: {', '.join(secrets)}.",
            remedy="Store it in a Secret and list that in launch.env_secrets.",
        )
    fields = list(_secret_fields(config.as_dict(), ""))
    if fields:
        raise UsageError(
            f"{', '.join(fields)} contains what looks like credentials, which the ConfigMap of the run would show.",
            remedy="Remove it. Store the login of a tracking server in a Secret listed in launch.env_secrets "
            "(MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD), a Hugging Face token in launch.hf_token_secret.",
        )


def _check_training(config: Config, work: Work) -> None:
    if work.mode != "train":
        return
    launch = config.launch
    min_nodes, max_nodes = launch.node_range
    for count in range(min_nodes, max_nodes + 1):  # every size that an elastic run may have
        micro_batches_in_step(config, count * launch.processes_per_node)
    if max_nodes > 1 and config.distributed.strategy == "none":
        raise UsageError(
            f"distributed.strategy is none, but launch.nodes is {launch.nodes}.",
            remedy="Use ddp or fsdp, or launch.nodes: 1.",
        )


def _check_prometheus(config: Config) -> None:
    port = config.tracking.prometheus.port
    if port is None:
        if config.launch.pod_monitor:
            raise UsageError(
                "launch.pod_monitor is true, but tracking.prometheus.port is null: there is nothing to scrape.",
                remedy="Set tracking.prometheus.port, such as 9400, or leave launch.pod_monitor out.",
            )
        return
    if port < MIN_PORT or port == master_port(config):
        raise UsageError(
            f"tracking.prometheus.port must be at least {MIN_PORT} on a cluster and differ from "
            f"distributed.master_port {master_port(config)}, got {port}.",
            remedy="Choose another port, such as 9400.",
        )


def _check_hold(config: Config, work: Work) -> None:
    if work.mode != "hold":
        return
    launch = config.launch
    min_nodes, max_nodes = launch.node_range
    if min_nodes < max_nodes:
        raise UsageError(
            f"launch.nodes is {launch.nodes}, but --hold needs a fixed number of pods.",
            remedy="Set launch.nodes to one number.",
        )
    _check_free(launch.mounts(config.output.mount_path), WORK_DIR, "held pods use")


def _check_free(mounts: dict[str, str], directory: str, user: str) -> None:
    """Refuse a volume at or below a directory of the pod."""
    for name, path in mounts.items():
        if f"{path}/".startswith(f"{directory}/"):
            raise UsageError(
                f"The {name} volume is mounted at {path}, but {user} {directory}.",
                remedy="Mount the volume elsewhere (output.root_dir, or the mount_path of the volume).",
            )


def _check_plugins(config: Config) -> None:
    chosen = [choice.name for choice in choices(config)]
    if chosen and config.launch.image_schema != SCHEMA_VERSION:
        raise UsageError(
            f"{', '.join(chosen)} cannot be used with launch.image_schema {config.launch.image_schema}: an image from "
            "before schema 3 accepts its own classes only.",
            remedy="Use an image with a newer llmtrain, and leave launch.image_schema out.",
        )


def _check_rendezvous(config: Config, work: Work, master_addr: str) -> None:
    launch, rendezvous = config.launch, config.distributed.rendezvous
    if rendezvous.backend == "etcd-v2" and work.launcher == "torchrun":
        raise UsageError(
            "distributed.rendezvous.backend etcd-v2 does not work with --launcher torchrun: when a process fails, "
            "torchrun closes the rendezvous in etcd for two hours, and replacement pods cannot join.",
            remedy="Use --launcher llmtrain, or the backend c10d.",
        )
    min_nodes, max_nodes = launch.node_range
    if rendezvous.backend == "static" and min_nodes < max_nodes:
        raise UsageError(
            f"launch.nodes is {launch.nodes}, but distributed.rendezvous.backend static needs a fixed number.",
            remedy="Use the backend c10d or etcd-v2, or set launch.nodes to one number.",
        )
    master = f"{master_addr}:{master_port(config)}"
    if rendezvous.backend in ("static", "c10d") and rendezvous.endpoint not in (None, master):
        raise UsageError(
            f"distributed.rendezvous.endpoint is {rendezvous.endpoint}, but the endpoint of {rendezvous.backend} is "
            f"pod 0, {master}.",
            remedy="Remove it (distributed.master_port sets the port), or use etcd-v2 for a separate server.",
        )


def _secret_fields(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secret_fields(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        if any(True for item in value for _ in _secret_fields(item, path)):
            yield path
    elif isinstance(value, str) and has_secret(value):
        yield path
