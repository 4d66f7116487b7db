"""plan_job: a config to a JobPlan. Names, labels and the arithmetic of processes are made here, once; the kinds only
write them down in the words of their platform."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from llmtrain import registry
from llmtrain.config.data import ExampleDataSection, FilesSection, HubDatasetSection
from llmtrain.config.distributed import DEFAULT_MASTER_PORT
from llmtrain.config.document import dump_document
from llmtrain.config.launch import NAME_LIMIT, DataVolumeSection, LaunchSection, mount_problems
from llmtrain.config.load import dump_config
from llmtrain.config.model import GptSection, HfCausalLmSection
from llmtrain.config.schema import SCHEMA_VERSION, Config
from llmtrain.config.upgrade import downgrade
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.env import NAMES
from llmtrain.env import EXIT_CODES, HOLD_SCRIPT, LAUNCH
from llmtrain.errors import UsageError
from llmtrain.hub.find import looks_like_path
from llmtrain.hub.needs import hub_needs
from llmtrain.hub.token import is_offline
from llmtrain.launch.pod_scripts import script_command
from llmtrain.redact import has_secret, secrets_in
from llmtrain.runs.directory import new_run_id
from llmtrain.tracking.mlflow import local_folder

Manifest = dict[str, Any]

WORK_DIR = "/work"  # of pods that are held: files that were pushed, and commands run there
CONFIG_DIR = "/config"
CONFIG_FILE = "train.yaml"
JOB_FILE = "job.json"
DEFAULT_NAMESPACE = "default"
APP_LABEL = {"app": "llmtrain"}
RUN_LABEL = "llmtrain/run"
READER_LABEL = "llmtrain/reader"  # of a pod that only reads a run's volume, and is none of its nodes
HTTPS_PORT = 443
LEAST_PORT = 1024  # that a pod without capabilities can bind
TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
# Variables that lead libraries elsewhere than usual.
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
# What the config may say about one process's place; in a cluster each pod finds out for itself.
PLACE_FIELDS = ("rank", "world_size", "local_rank", "master_addr", "init_method")


HELD_COMMAND = script_command(HOLD_SCRIPT, "hold.py")


@dataclass(frozen=True)
class Work:
    """What the pods run."""

    mode: Literal["train", "smoke", "doctor", "command", "hold"] = "train"
    command: tuple[str, ...] = ()
    """Mode `command`: a command of the user's own, for every process."""
    launcher: Literal["llmtrain", "torchrun"] = "llmtrain"
    """Mode `command`: what starts it; torchrun for images without llmtrain."""


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
    config: Config  # as pods read it
    master_port: int
    mounts: dict[str, str]  # volume -> path in the pods
    tracking_uri: str | None
    command: list[str]
    ports_outside: list[int]  # that pods must reach outside the run
    is_fetching: bool  # from the hub, before it trains or waits
    launch: LaunchSection
    work: Work = Work()
    number: int = 1
    """Which launch of the run this is: 1, and one more each time it is resumed."""
    nonce: str = ""
    """Tells launches of the same name apart when the record of an earlier one was deleted and its data kept."""
    warnings: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Processes of the run when all nodes are there."""
        return self.nodes * self.processes_per_node

    @property
    def config_text(self) -> str:
        """The config for the ConfigMap, in a schema that the image reads."""
        if self.launch.image_schema == SCHEMA_VERSION:
            return dump_config(self.config)
        return dump_document(downgrade(self.config.as_dict()))

    @property
    def launch_id(self) -> str:
        return launch_id(self.number, self.nonce)

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
        return config_map_name(self.run_id)

    def claim(self, volume: str) -> str:
        """The claim behind a volume: an existing one, or the one that is created."""
        return self.launch.volumes[volume].claim or f"{self.run_id}-{volume}"


def launch_id(number: int, nonce: str) -> str:
    return f"{number}-{nonce}" if nonce else str(number)


def config_map_name(run_id: str) -> str:
    """The object by which a run is known."""
    return f"{run_id}-config"


class Kind(Protocol):
    """A way to run pods: one module in kinds/, one row in registry.LAUNCHERS."""

    api_version: str
    kind: str
    """What the job itself is, in the cluster's words."""
    container: str
    """Name of the container, where the platform forces one."""
    states: dict[str, str]
    """Which of its conditions means `finished`, `failed` or `suspended`. Empty: it never ends by itself."""

    @staticmethod
    def index_variable(launch: LaunchSection) -> str:
        """The environment variable in which a pod finds which node it is."""

    @staticmethod
    def master_addr(run_id: str, launch: LaunchSection) -> str:
        """Pod 0's own name (never the Service's: every pod would take itself for the master)."""

    @staticmethod
    def render(plan: JobPlan) -> list[Manifest]:
        """The job, after what it needs first."""


def find_kind(launch: LaunchSection) -> Kind:
    kind: Kind = registry.resolve("launch.kind", launch.kind, registry.LAUNCHERS)
    return kind


def plan_job(
    config: Config,
    work: Work = Work(),  # noqa: B008 (frozen)
    number: int = 1,
    nonce: str = "",
    *,
    is_launched: bool = False,
) -> JobPlan:
    """Pure, but for the run id that is made where none is given. The same config gives the same plan. `is_launched`: it
    is on the cluster already, where refusing it for a secret would only be in the way of removing it."""
    launch = config.launch
    kind = find_kind(launch)
    run_id = config.output.run_id or new_run_id(config.run.name)
    min_nodes, nodes = launch.node_range
    master_addr = kind.master_addr(run_id, launch)
    _check(config, work, master_addr)
    if not is_launched:
        _check_secrets(config, work)
    resolved = _in_the_pod(config, run_id)
    is_fetching = work.mode in ("train", "hold") and hub_needs(resolved).any and not is_offline(launch.env)
    return JobPlan(
        run_id=run_id,
        namespace=launch.namespace or DEFAULT_NAMESPACE,
        min_nodes=min_nodes,
        nodes=nodes,
        processes_per_node=launch.processes_per_node,
        container=kind.container,
        master_addr=master_addr,
        config=resolved,
        master_port=_master_port(config),
        mounts=launch.mounts(resolved.output.mount_path),
        tracking_uri=config.tracking.mlflow.tracking_uri,
        command=_command(config, work, run_id, master_addr, launch_id(number, nonce)),
        ports_outside=_ports_outside(resolved, work, is_fetching or work.mode in ("command", "hold")),
        is_fetching=is_fetching,
        launch=launch,
        work=work,
        number=number,
        nonce=nonce,
        warnings=_warnings(resolved, work),
    )


def _command(config: Config, work: Work, run_id: str, master_addr: str, launched: str) -> list[str]:
    """What every pod runs, whatever the kind. Which node it is is not in here: the platform says that."""
    launch = config.launch
    own = [word.replace("$", "$$") for word in work.command]  # else Kubernetes puts $(NAME) in
    if work.mode == "hold":
        return [*HELD_COMMAND, "hold"]
    if work.launcher == "torchrun":
        return _torchrun(config, own, run_id, master_addr)
    return [
        *("python", "-m", "llmtrain", "node"),
        *(() if work.mode == "command" else ("--config", f"{CONFIG_DIR}/{CONFIG_FILE}")),
        *({"smoke": ["--smoke"], "doctor": ["--doctor"]}.get(work.mode, [])),
        *("--nodes", str(launch.nodes)),
        *("--processes-per-node", str(launch.processes_per_node)),
        *_rendezvous(config, run_id, master_addr, launched),
        *("--grace-sec", str(launch.grace_period_sec)),
        *(("--", *own) if work.mode == "command" else ()),
    ]


def _rendezvous(config: Config, run_id: str, master_addr: str, launched: str) -> list[str]:
    """Where pods meet, in the options of `llmtrain node`."""
    launch, wanted = config.launch, config.distributed.rendezvous
    backend = ["--rdzv-backend", wanted.backend] if wanted.backend else []
    if wanted.backend == "etcd-v2":
        # One server is for many: neither a run of this name in another namespace, nor pods of the launch before that
        # are about to end, may meet these.
        meeting_id = f"{launch.namespace or DEFAULT_NAMESPACE}-{run_id}-{launched}"
        return [*backend, "--rdzv-endpoint", str(wanted.endpoint), "--rdzv-id", meeting_id]
    at = ["--master-addr", master_addr, "--master-port", str(_master_port(config))]
    return [*at, *backend, "--rdzv-id", run_id]


def _torchrun(config: Config, own: list[str], run_id: str, master_addr: str) -> list[str]:
    """Which node it is, Kubernetes puts in: the value of $(NAME)."""
    launch = config.launch
    at, port = f"{master_addr}:{_master_port(config)}", _master_port(config)
    index = find_kind(launch).index_variable(launch)
    fewest, most = launch.node_range
    meeting = (
        ["--rdzv-backend=c10d", f"--rdzv-endpoint={at}", f"--rdzv-id={run_id}"]
        if fewest < most or config.distributed.rendezvous.backend == "c10d"
        else [f"--node-rank=$({index})", f"--master-addr={master_addr}", f"--master-port={port}"]
    )
    sizes = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.processes_per_node}"]
    return ["torchrun", *sizes, *meeting, "--no-python", *own]


def _in_the_pod(config: Config, run_id: str) -> Config:
    """The config as pods read it."""
    config = config.with_values("output", run_id=run_id, root_dir=config.output.mount_path)
    return config.with_values("distributed", **dict.fromkeys(PLACE_FIELDS))


def _master_port(config: Config) -> int:
    return config.distributed.master_port or DEFAULT_MASTER_PORT


def _check(config: Config, work: Work, master_addr: str) -> None:
    launch = config.launch
    min_nodes, nodes = launch.node_range
    is_training = work.mode == "train"
    for count in range(min_nodes, nodes + 1) if is_training else ():  # every size that the job may come to have
        micro_batches_in_step(config, count * launch.processes_per_node)
    if is_training and nodes > 1 and config.distributed.strategy == "none":
        raise UsageError(
            f"distributed.strategy is none, but launch.nodes is {launch.nodes}.", remedy="Use ddp or fsdp, or one node."
        )
    if work.mode == "hold" and min_nodes < nodes:
        raise UsageError(
            f"launch.nodes is {launch.nodes}, but pods that are held are a fixed number.", remedy="Give one number."
        )
    mounts = launch.mounts(config.output.mount_path)
    at_work = [path for path in mounts.values() if f"{path}/".startswith(f"{WORK_DIR}/")]
    if work.mode == "hold" and at_work:
        raise UsageError(
            f"A volume is mounted at {at_work[0]}, but pods that are held have their files in {WORK_DIR}.",
            remedy="Mount the volume elsewhere (output.root_dir, or the mount_path of the volume).",
        )
    if launch.kind == "stateful_set" and work.launcher == "torchrun":
        raise UsageError(
            "A StatefulSet starts pods again when they end, and under torchrun nothing keeps them from ending.",
            remedy="Use another --kind, or --launcher llmtrain.",
        )
    for _, problem in mount_problems(mounts):
        raise UsageError(problem)
    if _master_port(config) < LEAST_PORT:
        raise UsageError(
            f"distributed.master_port must be at least {LEAST_PORT} on a cluster, got {_master_port(config)}."
        )
    _check_rendezvous(config, work, master_addr)
    longest = f"{master_addr.partition('.')[0].removesuffix('0')}{nodes - 1}"
    if len(longest) > NAME_LIMIT:
        raise UsageError(f"{longest} must fit in {NAME_LIMIT} characters.", remedy="Set a shorter output.run_id.")
    reserved = {name for names in NAMES.values() for name in names} | {
        "HF_TOKEN",
        EXIT_CODES,
        LAUNCH,
    }
    taken = sorted(reserved.intersection(launch.env))
    if taken:
        raise UsageError(
            f"launch.env sets {', '.join(taken)}, which the launcher or the platform sets.",
            remedy="Leave it out: launch.nodes, launch.processes_per_node and distributed.rendezvous say it once for "
            "all pods.",
        )


def _check_secrets(config: Config, work: Work) -> None:
    """Everybody who may look at the namespace can read manifests and the ConfigMap with the config."""
    secrets = secrets_in(work.command)
    if secrets:
        raise UsageError(
            f"The command contains what looks like a secret, which every manifest would show: {', '.join(secrets)}.",
            remedy="Keep it in a Secret, and name that in launch.env_secrets.",
        )
    fields = list(_secret_fields(config.as_dict(), ""))
    if fields:
        raise UsageError(
            f"{', '.join(fields)}: what looks like credentials, or another secret, could be read by everybody in the "
            "ConfigMap of the run.",
            remedy="Leave it out. A login for a tracking server belongs in a Secret that launch.env_secrets names "
            "(MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD), a Hugging Face token in launch.hf_token_secret.",
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


def _check_rendezvous(config: Config, work: Work, master_addr: str) -> None:
    launch, wanted = config.launch, config.distributed.rendezvous
    if wanted.backend == "etcd-v2" and work.launcher == "torchrun":
        raise UsageError(
            "distributed.rendezvous.backend etcd-v2 does not go with --launcher torchrun: when a process fails, "
            "torchrun closes the meeting in etcd for two hours, and the pods that replace it cannot join.",
            remedy="Use --launcher llmtrain, or the backend c10d.",
        )
    min_nodes, nodes = launch.node_range
    if wanted.backend == "static" and min_nodes < nodes:
        raise UsageError(
            f"launch.nodes is {launch.nodes}, but distributed.rendezvous.backend static takes one number of nodes.",
            remedy="Use the backend c10d or etcd-v2, leave it out, or give one number of nodes.",
        )
    pod_0 = f"{master_addr}:{_master_port(config)}"
    if wanted.backend in ("static", "c10d") and wanted.endpoint not in (None, pod_0):
        raise UsageError(
            f"distributed.rendezvous.endpoint is {wanted.endpoint}, but with {wanted.backend} pods meet at pod 0, "
            f"{pod_0}.",
            remedy="Leave it out (distributed.master_port sets the port), or use etcd-v2 for a server of its own.",
        )


def _ports_outside(config: Config, work: Work, is_asking: bool) -> list[int]:
    """Ports of the hub, of the tracking server and of etcd, as far as this job asks them for anything."""
    ports = {HTTPS_PORT} if is_asking and not is_offline(config.launch.env) else set()
    rendezvous = config.distributed.rendezvous
    if rendezvous.backend == "etcd-v2":
        ports.add(int(str(rendezvous.endpoint).rpartition(":")[2]))
    places = [
        *(_tracking(config, work) or ())[1:],
        config.output.sync_uri,
        *(value for name, value in config.launch.env.items() if name.upper() in ENDPOINTS),
    ]
    for place in places:
        uri = urlsplit(place or "")
        if uri.scheme in ("http", "https", "s3"):
            ports.add(uri.port or (80 if uri.scheme == "http" else HTTPS_PORT))
    return sorted(ports)


def _tracking(config: Config, work: Work) -> tuple[str, str] | None:
    """Where pods track what they do, and the field that says so. A script of the user's own has only the environment;
    for llmtrain the config wins over it."""
    launch = config.launch
    in_env = (f"launch.env.{TRACKING_VARIABLE}", launch.env.get(TRACKING_VARIABLE))
    mlflow = config.tracking.mlflow
    in_config = ("tracking.mlflow.tracking_uri", mlflow.tracking_uri)
    rows = {
        "train": [in_config, in_env] * mlflow.enabled,
        "command": [in_env, in_config],
        "hold": [in_env, in_config],
    }
    return next(((field, uri) for field, uri in rows.get(work.mode, []) if uri), None)


def _tracking_warnings(config: Config, work: Work) -> list[str]:
    """A store in a directory that is gone with the pod, or that it cannot write."""
    field, uri = _tracking(config, work) or ("", None)
    folder = local_folder(uri) if uri else None
    mounts = config.launch.mounts(config.output.mount_path)
    kept = {
        name: mounts[name]
        for name, volume in config.launch.volumes.items()
        if not (isinstance(volume, DataVolumeSection) and volume.read_only)
    }
    if folder is None or any(folder.is_relative_to(mount) for mount in kept.values()):
        return []
    seen = ", ".join(f"{path} ({name}_volume)" for name, path in kept.items())
    return [f"{field} {uri} is not on a volume that pods write: what is tracked there is lost. They write {seen}."]


def _warnings(config: Config, work: Work) -> list[str]:
    """Paths of this machine that pods will not find, as far as a name can tell."""
    tracking = _tracking_warnings(config, work)
    if work.mode != "train":
        return tracking
    model, data, launch = config.model, config.data, config.launch

    def here(reference: str | None) -> list[str]:
        """A name of the hub is none of this, unless the hub may not be asked: --model-local-dir models/llama."""
        is_offline = isinstance(model, HfCausalLmSection) and model.local_files_only
        return [reference] if reference and (is_offline or looks_like_path(reference)) else []

    paths: dict[str, list[str | None]] = {
        "data.tokenizer": [data.tokenizer] if data.tokenizer not in (None, "byte", "char", "gpt2") else []
    }
    if isinstance(model, HfCausalLmSection):
        paths |= {"model.path": [*here(model.path)], "model.tokenizer_path": [*here(model.tokenizer_path)]}
    if isinstance(model, GptSection):
        paths["model.init"] = [model.init] if model.init != "random" else []
    if isinstance(data, FilesSection):
        paths |= {"data.files": [*data.files], "data.val_files": [*data.val_files]}
    if isinstance(data, ExampleDataSection):
        paths |= {"data.train_file": [data.train_file], "data.val_file": [data.val_file]}
    if isinstance(data, HubDatasetSection) and data.dataset_name and looks_like_path(data.dataset_name):
        paths["data.dataset_name"] = [data.dataset_name]
    mounts = launch.mounts(config.output.mount_path)
    seen = ", ".join(f"{path} ({name}_volume)" for name, path in mounts.items())
    warnings = [
        f"{field} {path} is not on a volume: unless the image {launch.image} has it, pods will not find it. They see "
        f"{seen}."
        for field, values in paths.items()
        for path in values
        if path and not any(f"{path}/".startswith(f"{mount}/") for mount in mounts.values())
    ]
    cache = data.cache_dir
    writable = [*mounts.values(), "/tmp", "/cache"]
    if cache.startswith("/") and not any(f"{cache}/".startswith(f"{mount}/") for mount in writable):
        warnings.append(
            f"data.cache_dir {cache} cannot be written in a pod. It may lie on a volume, or below ~ or /tmp."
        )
    return warnings + tracking
