"""Warnings about a plan: paths in the config that the pods probably do not have or cannot write."""

from llmtrain.config.data import ExampleDataSection, FilesSection, HubDatasetSection
from llmtrain.config.launch import DataVolumeSection
from llmtrain.config.model import GptSection, HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.hub.find import looks_like_path
from llmtrain.launch.endpoints import tracking_uri
from llmtrain.launch.work import Work
from llmtrain.tracking.mlflow import local_directory

WRITABLE_DIRS = ("/tmp", "/cache")


def plan_warnings(config: Config, work: Work) -> list[str]:
    warnings = [*_missing_paths(config), *_read_only_cache(config)] if work.mode == "train" else []
    return [*warnings, *_lost_tracking(config, work)]


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
    if isinstance(model, GptSection):
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
        if path and not any(f"{path}/".startswith(f"{mount}/") for mount in mounts.values())
    ]


def _read_only_cache(config: Config) -> list[str]:
    cache = config.data.cache_dir
    writable = [*config.launch.mounts(config.output.mount_path).values(), *WRITABLE_DIRS]
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
    if directory is None or any(directory.is_relative_to(mount) for mount in writable.values()):
        return []
    return [
        f"{field} {uri} is not on a writable volume of the pods ({_mount_list(writable)}): metrics tracked there are "
        "lost when the pod ends."
    ]


def _mount_list(mounts: dict[str, str]) -> str:
    return ", ".join(f"{path} ({name}_volume)" for name, path in mounts.items())
