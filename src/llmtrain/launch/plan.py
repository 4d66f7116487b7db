"""plan_job: a config to a JobPlan. Names, labels and the arithmetic of processes are made here, once; the kinds only
write them down in the words of their platform."""

from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from llmtrain import registry
from llmtrain.config.launch import NAME_LIMIT, LaunchSection, has_credentials
from llmtrain.config.load import dump_config
from llmtrain.config.schema import Config
from llmtrain.distributed.micro_batches import micro_batches_in_step
from llmtrain.distributed.sources import NAMES
from llmtrain.errors import UsageError
from llmtrain.runs.directory import new_run_id

Manifest = dict[str, Any]

CONFIG_DIR = "/config"
CONFIG_FILE = "train.yaml"
APP_LABEL = {"app": "llmtrain"}
RUN_LABEL = "llmtrain/run"
HTTPS_PORT = 443
# What the config may say about one process's place; in a cluster each pod finds out for itself.
PLACE_FIELDS = ("rank", "world_size", "local_rank", "master_addr", "master_port", "init_method")


@dataclass(frozen=True)
class JobPlan:
    """Everything a kind needs to know. `launch` is for what is passed on as it is (resources, tolerations, ...)."""

    run_id: str
    namespace: str
    min_nodes: int
    nodes: int  # pods that are made
    processes_per_node: int
    container: str
    master_addr: str
    config_text: str
    command: list[str]
    ports_outside: list[int]  # that pods must reach outside the run
    launch: LaunchSection

    @property
    def world_size(self) -> int:
        """Processes of the run when all nodes are there."""
        return self.nodes * self.processes_per_node

    @property
    def labels(self) -> dict[str, str]:
        """Of every object; and what a run's pods are found by."""
        return {**APP_LABEL, RUN_LABEL: self.run_id}

    @property
    def service(self) -> str:
        """The headless Service, which gives pods their names."""
        return self.run_id

    @property
    def config_map(self) -> str:
        return f"{self.run_id}-config"

    def claim(self, volume: str) -> str:
        """The claim behind a volume: an existing one, or the one that is created."""
        return self.launch.volumes[volume].claim or f"{self.run_id}-{volume}"


class Kind(Protocol):
    """A way to run pods: one module in kinds/, one row in registry.LAUNCHERS."""

    container: str
    """Name of the container, where the platform forces one."""

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:
        """Pod 0's own name (never the Service's: every pod would take itself for the master)."""

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        """The job, after what it needs first."""


def find_kind(launch: LaunchSection) -> Kind:
    kind: Kind = registry.resolve("launch.kind", launch.kind, registry.LAUNCHERS)
    return kind


def plan_job(config: Config) -> JobPlan:
    """Pure, but for the run id that is made where none is given. The same config gives the same plan."""
    launch = config.launch
    kind = find_kind(launch)
    run_id = launch.name or config.output.run_id or new_run_id(config.run.name)
    if launch.name and config.output.run_id not in (None, launch.name):
        raise UsageError(
            f"launch.name is {launch.name} but output.run_id is {config.output.run_id}: a job is named as its run.",
            remedy="Give one of them, or both the same.",
        )
    min_nodes, nodes = launch.node_range
    master_addr = kind.master_addr(run_id, launch)
    _check(config, master_addr)
    resolved = _in_the_pod(config, run_id)
    return JobPlan(
        run_id=run_id,
        namespace=launch.namespace,
        min_nodes=min_nodes,
        nodes=nodes,
        processes_per_node=launch.processes_per_node,
        container=kind.container,
        master_addr=master_addr,
        config_text=dump_config(resolved),
        command=_command(launch, run_id, master_addr),
        ports_outside=_ports_outside(resolved),
        launch=launch,
    )


def _command(launch: LaunchSection, run_id: str, master_addr: str) -> list[str]:
    """What every pod runs, whatever the kind. Which node it is is not in here: the platform says that."""
    return [
        *("python", "-m", "llmtrain", "node"),
        *("--config", f"{CONFIG_DIR}/{CONFIG_FILE}"),
        *("--nodes", str(launch.nodes)),
        *("--processes-per-node", str(launch.processes_per_node)),
        *("--master-addr", master_addr),
        *("--master-port", str(launch.master_port)),
        *("--rdzv-id", run_id),
        *("--grace-sec", str(launch.grace_period_sec)),
    ]


def _in_the_pod(config: Config, run_id: str) -> Config:
    """The config as pods read it."""
    config = config.with_values("output", run_id=run_id, root_dir=config.launch.runs_volume.mount_path)
    config = config.with_values("launch", name=run_id)
    config = config.with_values("distributed", **dict.fromkeys(PLACE_FIELDS))
    if config.launch.tracking_uri:
        config = config.with_values("mlflow", tracking_uri=config.launch.tracking_uri)
    return config


def _check(config: Config, master_addr: str) -> None:
    launch = config.launch
    min_nodes, nodes = launch.node_range
    for count in range(min_nodes, nodes + 1):  # every size that the job may come to have
        micro_batches_in_step(config, count * launch.processes_per_node)
    if nodes > 1 and config.distributed.strategy == "none":
        raise UsageError(
            f"distributed.strategy is none, but launch.nodes is {launch.nodes}.", remedy="Use ddp or fsdp, or one node."
        )
    longest = f"{master_addr.partition('.')[0].removesuffix('0')}{nodes - 1}"
    if len(longest) > NAME_LIMIT:
        raise UsageError(f"{longest} must fit in {NAME_LIMIT} characters.", remedy="Give a shorter launch.name.")
    reserved = {name for names in NAMES.values() for name in names} | {"HF_TOKEN", "LLMTRAIN_EXIT_CODES"}
    taken = sorted(reserved.intersection(launch.env))
    if taken:
        raise UsageError(
            f"launch.env sets {', '.join(taken)}, which the launcher or the platform sets.",
            remedy="Leave it out: launch.nodes and launch.processes_per_node say it once for all pods.",
        )
    if config.mlflow.tracking_uri and has_credentials(config.mlflow.tracking_uri):
        raise UsageError(
            "mlflow.tracking_uri has credentials in it, which everybody could read in the ConfigMap.",
            remedy="Leave them out of the URI.",
        )


def _ports_outside(config: Config) -> list[int]:
    """Ports of the hub and of the tracking server, as far as this config asks them for anything."""
    model, data = config.model, config.data
    wants_model = model.name == "hf_causal_lm" and not model.local_files_only and not _is_path(model.path)
    wants_data = bool(data.dataset_name) and not _is_path(data.dataset_name)
    is_offline = config.launch.env.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    ports = {HTTPS_PORT} if (wants_model or wants_data or data.tokenizer == "gpt2") and not is_offline else set()
    uri = urlsplit(config.mlflow.tracking_uri or "")
    if config.mlflow.enabled and uri.scheme in ("http", "https"):
        ports.add(uri.port or (HTTPS_PORT if uri.scheme == "https" else 80))
    return sorted(ports)


def _is_path(name: str | None) -> bool:
    return (name or "").startswith(("/", "./", "../", "~"))
