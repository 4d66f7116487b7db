"""Warnings about a plan: what the pods probably do not have, cannot write, or are not admitted with."""

from llmtrain.config.data import ExampleDataSection, FilesSection, HubDatasetSection
from llmtrain.config.launch import DataVolumeSection, LaunchSection
from llmtrain.config.model import AnyGptSection, HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.hub.find import looks_like_path
from llmtrain.launch.endpoints import tracking_uri
from llmtrain.launch.work import Work
from llmtrain.tracking.mlflow import local_directory

WRITABLE_DIRS = ("/tmp", "/cache")
LOCAL_CONTEXTS = ("kind-", "k3d-", "minikube", "docker-desktop", "rancher-desktop", "orbstack", "colima")
"""Prefixes of kubeconfig contexts of local clusters, into which images are loaded without a registry."""


def plan_warnings(config: Config, work: Work) -> list[str]:
    warnings = [*_missing_paths(config), *_read_only_cache(config), *_idle_gpus(config)] if work.mode == "train" else []
    return [
        *warnings,
        *_lost_tracking(config, work),
        *_missing_api_key(config, work),
        *_unbindable_claims(config),
        *_pod_security(config),
        *unused_capabilities(config.launch),
    ]


def image_warning(launch: LaunchSection, context: str | None) -> str | None:
    """The warning about an image that only a local cluster has. `context`: the kubeconfig context, if known."""
    repository = launch.image.rpartition("@")[0] or launch.image
    is_local = (context or "").startswith(LOCAL_CONTEXTS)
    if "/" in repository or launch.image_pull_policy == "Never" or is_local:
        return None
    return (
        f"launch.image {launch.image} names no registry: nodes that do not have it pull docker.io/library/"
        f"{launch.image}. Push it to a registry that the cluster can reach and pass --image REGISTRY/{launch.image}."
    )


def _idle_gpus(config: Config) -> list[str]:
    gpus = config.launch.resources.gpus
    if config.run.device != "cpu" or not gpus:
        return []
    return [f"run.device is cpu, but launch.resources.gpus requests {gpus} per pod: they would be idle."]


def _unbindable_claims(config: Config) -> list[str]:
    """New claims that all pods write, of a storage class that nobody chose."""
    launch = config.launch
    return [
        f"launch.{name}_volume creates a ReadWriteMany claim of the default StorageClass. Block storage (EBS, "
        "Persistent Disk, Azure Disk) cannot provide one, and the pods would stay Pending. Set "
        f"launch.{name}_volume.claim to an existing claim, or launch.{name}_volume.storage_class to a shared file "
        "system."
        for name, volume in launch.volumes.items()
        if not volume.claim
        and not volume.storage_class
        and (volume.access_mode or ("ReadWriteMany" if launch.node_range[1] > 1 else None)) == "ReadWriteMany"
    ]


def _pod_security(config: Config) -> list[str]:
    """Fields that namespaces with the Pod Security level of the config reject."""
    launch = config.launch
    fields = ["launch.host_network"] * launch.host_network
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


def _missing_paths(config: Config) -> list[str]:
    """Local paths that are not on a volume."""
    model, data, launch = config.model, config.data, config.launch

    def local(reference: str | None) -> list[str]:
        """A hub name is not a path, unless only local files may be used (--model-local-dir models/llama)."""
        is_local = isinstance(model, HfCausalLmSection) and model.local_files_only
        return [reference] if reference and (is_local or looks_like_path(reference)) else []

    paths: dict[str, list[str | None]] = {
        "data.tokenizer": [data.tokenizer] if data.tokenizer not in (None, "byte", "char", "gpt2") else []
    }
    if isinstance(model, HfCausalLmSection):
        paths |= {"model.path": [*local(model.path)], "model.tokenizer_path": [*local(model.tokenizer_path)]}
    if isinstance(model, AnyGptSection):
        paths["model.init"] = [model.init] if model.init != "random" else []
    if isinstance(data, FilesSection):
        paths |= {"data.files": [*data.files], "data.val_files": [*data.val_files]}
    if isinstance(data, ExampleDataSection):
        paths |= {"data.train_file": [data.train_file], "data.val_file": [data.val_file]}
    if isinstance(data, HubDatasetSection) and data.dataset_name and looks_like_path(data.dataset_name):
        paths["data.dataset_name"] = [data.dataset_name]
    mounts = launch.mounts(config.output.mount_path)
    return [
        f"{field} {path} is not on a volume of the pods ({_mount_list(mounts)}). It must be part of the image "
        f"{launch.image}."
        for field, values in paths.items()
        for path in values
        if path and not any(f"{path}/".startswith(f"{mount}/") for mount in [*mounts.values(), *_extra_paths(launch)])
    ]


def _read_only_cache(config: Config) -> list[str]:
    cache = config.data.cache_dir
    launch = config.launch
    writable = [*launch.mounts(config.output.mount_path).values(), *WRITABLE_DIRS, *_extra_paths(launch, writable=True)]
    if not cache.startswith("/") or any(f"{cache}/".startswith(f"{mount}/") for mount in writable):
        return []
    return [f"data.cache_dir {cache} is not writable in a pod. Use a path on a volume, or below ~ or /tmp."]


def _lost_tracking(config: Config, work: Work) -> list[str]:
    """A tracking store in a directory that is deleted with the pod, or that the pod cannot write."""
    field, uri = tracking_uri(config, work) or ("", None)
    directory = local_directory(uri) if uri else None
    launch = config.launch
    writable = {
        name: path
        for name, path in launch.mounts(config.output.mount_path).items()
        if not (isinstance(volume := launch.volumes[name], DataVolumeSection) and volume.read_only)
    }
    paths = [*writable.values(), *_extra_paths(launch, writable=True)]
    if directory is None or any(directory.is_relative_to(mount) for mount in paths):
        return []
    return [
        f"{field} {uri} is not on a writable volume of the pods ({_mount_list(writable)}): metrics tracked there are "
        "lost when the pod ends."
    ]


def _missing_api_key(config: Config, work: Work) -> list[str]:
    wandb, launch = config.tracking.wandb, config.launch
    if work.mode != "train" or not wandb.enabled or wandb.offline or launch.env_secrets or launch.pod_patch:
        return []
    return [
        "tracking.wandb.enabled is true, but launch.env_secrets is empty: without WANDB_API_KEY the pods cannot log in."
        " Store it in a Secret and name that in launch.env_secrets, or set tracking.wandb.offline."
    ]


def _extra_paths(launch: LaunchSection, writable: bool = False) -> list[str]:
    """Mount paths of launch.extra_volumes."""
    return [mount["mountPath"].rstrip("/") for mount in launch.extra_mounts if not (writable and mount.get("readOnly"))]


def _mount_list(mounts: dict[str, str]) -> str:
    return ", ".join(f"{path} ({name}_volume)" for name, path in mounts.items())
