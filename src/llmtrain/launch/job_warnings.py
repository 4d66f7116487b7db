"""Warnings about a plan: what the pods probably do not have, cannot write, or are not admitted with."""

from llmtrain.config.data import DataSection, ExampleFilesSection, FilesSection, HubDatasetSection
from llmtrain.config.launch import DataVolumeSection, LaunchSection
from llmtrain.config.mixture import MixtureSection
from llmtrain.config.model import AnyGptSection, HfCausalLmSection
from llmtrain.config.run import RunSection
from llmtrain.config.schema import Config
from llmtrain.config.tracking import MlflowSection, WandbSection
from llmtrain.hub.find import looks_like_path
from llmtrain.kubernetes.api_errors import own_containers
from llmtrain.launch.egress import TRACKING_VARIABLE, tracking_uri
from llmtrain.launch.pod_task import PodTask
from llmtrain.tracking.mlflow import local_directory

WRITABLE_DIRS = ("/tmp", "/cache")
LOCAL_CONTEXTS = ("kind-", "k3d-", "minikube", "docker-desktop", "rancher-desktop", "orbstack", "colima")
"""Prefixes of kubeconfig contexts of local clusters, into which images are loaded without a registry."""


def plan_warnings(config: Config, task: PodTask, limits_crashes: bool) -> list[str]:
    """`limits_crashes`: whether the kind does so itself."""
    launch = config.launch
    mounts = launch.mounts(config.output.mount_path)
    warnings = []
    if task.mode == "train":
        warnings += _missing_paths(config, mounts)
        warnings += _read_only_cache(config.data.cache_dir, launch, mounts)
        warnings += _idle_gpus(config.run, launch)
    tracking = tracking_uri(config.tracking.mlflow, launch, task)
    if tracking:
        warnings += _lost_tracking(*tracking, launch, mounts)
        warnings += _unused_tracking_uri(tracking[0], config.tracking.mlflow, launch, task)
    if task.mode == "train":
        warnings += _missing_api_key(config.tracking.wandb, launch)
    warnings += _unbindable_claims(launch, task)
    if not limits_crashes:
        warnings += _uncounted_crashes(launch, task)
    return [*warnings, *_pod_security(launch), *_sidecars(launch), *unused_capabilities(launch)]


def image_warning(launch: LaunchSection, context: str | None) -> str | None:
    """The warning about an image that only a local cluster has. `context`: the kubeconfig context, if known."""
    if launch.image is None:
        return None
    repository = launch.image.rpartition("@")[0] or launch.image
    is_local = (context or "").startswith(LOCAL_CONTEXTS)
    if "/" in repository or launch.image_pull_policy == "Never" or is_local:
        return None
    return (
        f"launch.image {launch.image} names no registry: nodes that do not have it pull docker.io/library/"
        f"{launch.image}. Push it to a registry that the cluster can reach and pass --image REGISTRY/{launch.image}."
    )


def _idle_gpus(run: RunSection, launch: LaunchSection) -> list[str]:
    gpus = launch.resources.gpus
    if run.device != "cpu" or not gpus:
        return []
    return [f"run.device is cpu, but launch.resources.gpus requests {gpus} per pod: they would be idle."]


def _uncounted_crashes(launch: LaunchSection, task: PodTask) -> list[str]:
    is_counted_with_volume = task.mode == "command" and task.launcher == "llmtrain"
    if launch.runs_volume or not is_counted_with_volume:
        return []
    return [
        f"launch.runs_volume is null, so crashes of the command are not counted: a {launch.kind} restarts it "
        "without limit."
    ]


def _unbindable_claims(launch: LaunchSection, task: PodTask) -> list[str]:
    """New claims that all pods write, of the default StorageClass."""
    has_several_nodes = launch.node_range[1] > 1
    warnings = []
    for name, volume in launch.volumes.items():
        # Without access_mode, a claim that several nodes mount is ReadWriteMany.
        is_shared = volume.access_mode == "ReadWriteMany" or (volume.access_mode is None and has_several_nodes)
        if volume.claim or volume.storage_class or not is_shared:
            continue
        remedy = (
            f"Set launch.{name}_volume.claim to an existing claim, or launch.{name}_volume.storage_class to a shared "
            "file system"
        )
        if name == "runs" and task.mode in ("command", "doctor", "smoke"):
            remedy += ", or launch.runs_volume to null if the run leaves no files to keep"
        warnings.append(
            f"launch.{name}_volume creates a ReadWriteMany claim of the default StorageClass. Block storage (EBS, "
            f"Persistent Disk, Azure Disk) cannot provide one, and the pods would stay Pending. {remedy}."
        )
    return warnings


def _sidecars(launch: LaunchSection) -> list[str]:
    """Further containers that the patch adds; one for the trainer has no image."""
    spec = launch.pod_patch.get("spec")
    if not isinstance(spec, dict):
        return []
    warnings = []
    for container in spec.get("containers") or []:
        if not isinstance(container, dict) or "image" not in container or container.get("name") in own_containers():
            continue
        warnings.append(
            f"launch.pod_patch adds container {container.get('name')}: the pod ends only when that container has ended "
            "too, and fails if it fails. An init container with restartPolicy Always is stopped after the trainer."
        )
    return warnings


def _pod_security(launch: LaunchSection) -> list[str]:
    """Fields that namespaces with the Pod Security level of the config reject."""
    fields = []
    if launch.host_network:
        fields.append("launch.host_network")
    fields += [f"launch.capabilities {name}" for name in launch.capabilities if name != "NET_BIND_SERVICE"]
    fields += [f"hostPath volume {volume['name']}" for volume in launch.extra_volumes if "hostPath" in volume]
    if not fields:
        return []
    return [
        f"{', '.join(fields)}: only namespaces that enforce Pod Security `privileged`, or nothing, admit such pods."
    ]


def unused_capabilities(launch: LaunchSection) -> list[str]:
    """Added capabilities of a user who is not root, which the kernel drops at exec."""
    is_user = launch.security == "restricted" or bool(launch.run_as_user)
    if not launch.capabilities or not is_user:
        return []
    return [
        f"launch.capabilities {', '.join(launch.capabilities)}: the kernel gives added capabilities to root only, "
        "unless they are ambient. Set launch.security to baseline and launch.run_as_user to 0."
    ]


def _missing_paths(config: Config, mounts: dict[str, str]) -> list[str]:
    """Local paths that are not on a volume."""
    model = config.model
    data = config.data
    launch = config.launch

    def local(reference: str | None) -> list[str]:
        """A hub name is not a path, unless only local files may be used (--model-local-dir models/llama)."""
        is_local = isinstance(model, HfCausalLmSection) and model.local_files_only
        return [reference] if reference and (is_local or looks_like_path(reference)) else []

    paths: dict[str, list[str | None]] = {}
    if data.tokenizer not in (None, "byte", "char", "gpt2"):
        paths["data.tokenizer"] = [data.tokenizer]
    if isinstance(model, HfCausalLmSection):
        paths["model.path"] = [*local(model.path)]
        paths["model.tokenizer_path"] = [*local(model.tokenizer_path)]
    if isinstance(model, AnyGptSection) and model.init != "random":
        paths["model.init"] = [model.init]
    paths |= _data_paths(data, "data")
    if isinstance(data, MixtureSection):
        for index, section in enumerate(data.sections()):
            paths |= _data_paths(section, f"data.sources.{index}")
    on_volumes = [*mounts.values(), *_extra_paths(launch)]
    warnings = []
    for field, values in paths.items():
        for path in values:
            if path and not _is_below(path, on_volumes):
                warnings.append(
                    f"{field} {path} is not on a volume of the pods ({_mount_list(mounts)}). It must be part of the "
                    f"image {launch.image}."
                )
    return warnings


def _data_paths(data: DataSection, place: str) -> dict[str, list[str | None]]:
    """The paths of a data section, by field."""
    paths: dict[str, list[str | None]] = {}
    if isinstance(data, FilesSection):
        paths[f"{place}.files"] = [*data.files]
        paths[f"{place}.val_files"] = [*data.val_files]
    if isinstance(data, ExampleFilesSection):
        paths[f"{place}.train_file"] = [data.train_file]
        paths[f"{place}.val_file"] = [data.val_file]
    if isinstance(data, HubDatasetSection) and data.dataset_name and looks_like_path(data.dataset_name):
        paths[f"{place}.dataset_name"] = [data.dataset_name]
    return paths


def _read_only_cache(cache_dir: str, launch: LaunchSection, mounts: dict[str, str]) -> list[str]:
    writable = [*mounts.values(), *WRITABLE_DIRS, *_extra_paths(launch, writable=True)]
    if not cache_dir.startswith("/") or _is_below(cache_dir, writable):
        return []
    return [f"data.cache_dir {cache_dir} is not writable in a pod. Use a path on a volume, or below ~ or /tmp."]


def _lost_tracking(field: str, uri: str, launch: LaunchSection, mounts: dict[str, str]) -> list[str]:
    """A tracking store in a directory that is deleted with the pod, or that the pod cannot write."""
    directory = local_directory(uri)
    if directory is None:
        return []
    writable = {}
    for name, path in mounts.items():
        volume = launch.volumes[name]
        if not (isinstance(volume, DataVolumeSection) and volume.read_only):
            writable[name] = path
    paths = [*writable.values(), *_extra_paths(launch, writable=True)]
    if any(directory.is_relative_to(mount) for mount in paths):
        return []
    return [
        f"{field} {uri} is not on a writable volume of the pods ({_mount_list(writable)}): metrics tracked there are "
        "lost when the pod ends."
    ]


def _unused_tracking_uri(used: str, mlflow: MlflowSection, launch: LaunchSection, task: PodTask) -> list[str]:
    """Interactive pods use both: llmtrain the one of the config, other programs that of the environment."""
    fields = {
        "tracking.mlflow.tracking_uri": mlflow.tracking_uri,
        f"launch.env.{TRACKING_VARIABLE}": launch.env.get(TRACKING_VARIABLE),
    }
    if task.mode == "hold" or not all(fields.values()) or len(set(fields.values())) == 1:
        return []
    (unused,) = fields.keys() - {used}
    return [f"{unused} ({fields[unused]}) is not used: {used} takes precedence. Remove one of them."]


def _missing_api_key(wandb: WandbSection, launch: LaunchSection) -> list[str]:
    if not wandb.enabled or wandb.offline or launch.env_secrets or launch.pod_patch:
        return []
    return [
        "tracking.wandb.enabled is true, but launch.env_secrets is empty: without WANDB_API_KEY the pods cannot log in."
        " Store it in a Secret and name that in launch.env_secrets, or set tracking.wandb.offline."
    ]


def _extra_paths(launch: LaunchSection, writable: bool = False) -> list[str]:
    """Mount paths of launch.extra_volumes."""
    return [mount["mountPath"].rstrip("/") for mount in launch.extra_mounts if not (writable and mount.get("readOnly"))]


def _is_below(path: str, directories: list[str]) -> bool:
    return any(f"{path}/".startswith(f"{directory}/") for directory in directories)


def _mount_list(mounts: dict[str, str]) -> str:
    return ", ".join(f"{path} ({name}_volume)" for name, path in mounts.items()) or "none"
