"""Configs that cannot run on a cluster, refused before anything is created."""

from collections.abc import Iterator
from typing import Any

from llmtrain.compat.records import check_nothing_lost, check_plugins_in_image
from llmtrain.config.check_plugins import choices
from llmtrain.config.distributed import DistributedSection
from llmtrain.config.kubernetes_syntax import syntax_problems
from llmtrain.config.kubernetes_types import NAME_LIMIT
from llmtrain.config.launch import HF_TOKEN, LaunchSection, mount_problems
from llmtrain.config.schema import Config
from llmtrain.config.tracking import PrometheusSection
from llmtrain.config.trainer import TrainerSection
from llmtrain.core.env import CODE_DIR, CODE_HASH, EXIT_CODES, LAUNCH
from llmtrain.core.redact import has_secret, secrets_in
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.platform_env import NAMES
from llmtrain.errors import UsageError
from llmtrain.launch.image import missing_image
from llmtrain.launch.kinds.base import Kind
from llmtrain.launch.pod_task import CODE_PATH, WORK_DIR, PodTask, master_port

MIN_PORT = 1024  # a pod without capabilities cannot bind lower ones


def check_config(config: Config, task: PodTask, kind: Kind, master_addr: str, has_code: bool = False) -> None:
    launch = config.launch
    distributed = config.distributed
    mounts = launch.mounts(config.output.mount_path)
    check_plugins_in_image([choice.name for choice in choices(config)], launch.image_schema)
    if task.mode == "train":
        _check_process_count(config.trainer, distributed, launch)
    if task.mode == "hold":
        _check_hold(launch, mounts)
    _check_rendezvous(distributed, launch, task, master_addr)
    kind.check_task(task)
    for _, problem in mount_problems(mounts):
        raise UsageError(problem)
    if has_code:
        _check_free(mounts, CODE_PATH, "--with-code uses")
    port = master_port(distributed)
    if port < MIN_PORT:
        raise UsageError(f"distributed.master_port must be at least {MIN_PORT} on a cluster, got {port}.")
    _check_prometheus(config.tracking.prometheus, launch, port)
    # master_addr is that of pod 0. The pod with the highest index has the longest name.
    longest_name = f"{master_addr.partition('.')[0].removesuffix('0')}{launch.node_range[1] - 1}"
    if len(longest_name) > NAME_LIMIT:
        raise UsageError(
            f"The pod name {longest_name} exceeds {NAME_LIMIT} characters.", remedy="Set a shorter output.run_id."
        )
    reserved = {CODE_DIR, CODE_HASH, EXIT_CODES, LAUNCH}
    reserved.update(*NAMES.values())
    token = launch.hf_token_secret
    if token.variable in reserved:
        raise UsageError(
            f"launch.hf_token_secret.variable is {token.variable}, which the launcher or the platform sets.",
            remedy="Use HF_TOKEN, or the variable that your program reads the token from.",
        )
    reserved.add(HF_TOKEN)
    if token.name:
        reserved.add(token.variable)
    conflicts = sorted(reserved.intersection(launch.env))
    if conflicts:
        raise UsageError(
            f"launch.env sets {', '.join(conflicts)}, which the launcher or the platform sets.",
            remedy="Remove it. launch.nodes, launch.processes_per_node and distributed.rendezvous apply to all pods.",
        )


LOST_WITHOUT_VOLUME = {
    "train": "checkpoints, metrics and logs would be lost with the pods, and a restarted pod would begin at step 0",
    "hold": "the files of interactive pods would be lost with them",
}
"""Task -> what it needs the runs volume for."""


def check_launch(config: Config, task: PodTask) -> None:
    """What is only refused before a launch: a run that is on the cluster already must stay removable."""
    _check_command_secrets(task)
    _check_config_secrets(config)
    launch = config.launch
    if launch.image is None:
        raise missing_image(
            "launch.image is not set: pods need an image with llmtrain that the cluster can pull.", can_build=True
        )
    for _, problem in syntax_problems(launch):  # also of a change by `resume`
        raise UsageError(problem)
    if launch.runs_volume is None and task.mode in LOST_WITHOUT_VOLUME:
        raise UsageError(
            f"launch.runs_volume is null, but {LOST_WITHOUT_VOLUME[task.mode]}.",
            remedy="Set launch.runs_volume.claim to an existing claim, or launch.runs_volume.size. null is for a "
            "command after --, --doctor and --smoke.",
        )
    check_nothing_lost(config)
    mounts = [*launch.mounts(config.output.mount_path).values(), WORK_DIR]
    extra = [mount["mountPath"].rstrip("/") for mount in launch.extra_mounts]
    taken = [path for path in extra if path in mounts]
    if taken:
        raise UsageError(
            f"launch.extra_mounts: {', '.join(taken)} is already used in pods.", remedy="Choose another mountPath."
        )
    may_have_gpus = launch.resources.gpus or launch.resources.extra or launch.pod_patch  # such as a resource claim
    if task.mode == "train" and config.run.device == "cuda" and not may_have_gpus:
        raise UsageError(
            "run.device is cuda, but launch.resources.gpus is 0: the pods would have no GPU.",
            remedy="Set launch.resources.gpus, for example --set launch.resources.gpus=1 (equal to "
            "launch.processes_per_node), or run.device: cpu.",
        )


def _check_command_secrets(task: PodTask) -> None:
    """Everyone who may read the namespace can read the manifests."""
    secrets = secrets_in(task.command)
    if secrets:
        raise UsageError(
            f"The command contains what looks like a secret, which the manifests would show: {', '.join(secrets)}.",
            remedy="Store it in a Secret and list that in launch.env_secrets.",
        )


def _check_config_secrets(config: Config) -> None:
    """Everyone who may read the namespace can read the config in the ConfigMap."""
    fields = list(_secret_fields(config.as_dict(), ""))
    if fields:
        raise UsageError(
            f"{', '.join(fields)} contains what looks like credentials, which the ConfigMap of the run would show.",
            remedy="Remove it. Store the login of a tracking server in a Secret listed in launch.env_secrets "
            "(MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD), a Hugging Face token in launch.hf_token_secret.",
        )


def _check_process_count(trainer: TrainerSection, distributed: DistributedSection, launch: LaunchSection) -> None:
    min_nodes, max_nodes = launch.node_range
    for count in range(min_nodes, max_nodes + 1):  # every size that an elastic run may have
        micro_batches_in_step(trainer, distributed, count * launch.processes_per_node)
    if max_nodes > 1 and distributed.strategy == "none":
        raise UsageError(
            f"distributed.strategy is none, but launch.nodes is {launch.nodes}.",
            remedy="Use ddp or fsdp, or launch.nodes: 1.",
        )


def _check_prometheus(prometheus: PrometheusSection, launch: LaunchSection, training_port: int) -> None:
    port = prometheus.port
    if port is None:
        if launch.pod_monitor:
            raise UsageError(
                "launch.pod_monitor is true, but tracking.prometheus.port is null: there is nothing to scrape.",
                remedy="Set tracking.prometheus.port, such as 9400, or leave launch.pod_monitor out.",
            )
        return
    if port < MIN_PORT or port == training_port:
        raise UsageError(
            f"tracking.prometheus.port must be at least {MIN_PORT} on a cluster and differ from "
            f"distributed.master_port {training_port}, got {port}.",
            remedy="Choose another port, such as 9400.",
        )


def _check_hold(launch: LaunchSection, mounts: dict[str, str]) -> None:
    min_nodes, max_nodes = launch.node_range
    if min_nodes < max_nodes:
        raise UsageError(
            f"launch.nodes is {launch.nodes}, but --hold needs a fixed number of pods.",
            remedy="Set launch.nodes to one number.",
        )
    _check_free(mounts, WORK_DIR, "held pods use")


def _check_free(mounts: dict[str, str], directory: str, user: str) -> None:
    """Refuse a volume at or below a directory of the pod."""
    for name, path in mounts.items():
        if f"{path}/".startswith(f"{directory}/"):
            raise UsageError(
                f"The {name} volume is mounted at {path}, but {user} {directory}.",
                remedy="Mount the volume elsewhere (output.root_dir, or the mount_path of the volume).",
            )


def _check_rendezvous(distributed: DistributedSection, launch: LaunchSection, task: PodTask, master_addr: str) -> None:
    rendezvous = distributed.rendezvous
    if rendezvous.backend == "etcd-v2" and task.launcher == "torchrun":
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
    master = f"{master_addr}:{master_port(distributed)}"
    if rendezvous.backend in ("static", "c10d") and rendezvous.endpoint not in (None, master):
        raise UsageError(
            f"distributed.rendezvous.endpoint is {rendezvous.endpoint}, but the endpoint of {rendezvous.backend} is "
            f"pod 0, {master}.",
            remedy="Remove it (distributed.master_port sets the port), or use etcd-v2 for a separate server.",
        )


def _secret_fields(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _secret_fields(item, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list):
        if any(any(_secret_fields(item, path)) for item in value):
            yield path  # once, without the index
    elif isinstance(value, str) and has_secret(value):
        yield path
