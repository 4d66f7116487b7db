"""plan_job: a config to a JobPlan. Names, labels and the arithmetic of processes are made here, once; the kinds only
write them down in the words of their platform."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from llmtrain import registry
from llmtrain.config.launch import NAME_LIMIT, DataVolumeSection, LaunchSection
from llmtrain.config.load import dump_config
from llmtrain.config.schema import Config
from llmtrain.distributed.batch_split import micro_batches_in_step
from llmtrain.distributed.env import NAMES
from llmtrain.env import EXIT_CODES, HOLD_SCRIPT, LAUNCH
from llmtrain.errors import UsageError
from llmtrain.hub.find import looks_like_path
from llmtrain.hub.needs import hub_needs
from llmtrain.hub.token import is_offline
from llmtrain.kubernetes.labels import COMMON_LABELS, RUN_LABEL, run_selector
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
HTTPS_PORT = 443
TRACKING_VARIABLE = "MLFLOW_TRACKING_URI"
# Variables that lead libraries elsewhere than usual.
ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
# What the config may say about one process's place; in a cluster each pod finds out for itself.
PLACE_FIELDS = ("rank", "world_size", "local_rank", "master_addr", "master_port", "init_method")


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
    config_text: str
    command: list[str]
    ports_outside: list[int]  # that pods must reach outside the run
    is_fetching: bool  # from the hub, before it trains or waits
    launch: LaunchSection
    work: Work = Work()
    number: int = 1
    """Which launch of the run this is: 1, and one more each time it is resumed."""
    nonce: str = ""
    """Tells launches of the same name apart when the record of an earlier one was deleted and its data kept."""
    run_label: str = RUN_LABEL
    """Key of the label that carries the run id: that of the run's first launch (see kubernetes/labels.py)."""
    warnings: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        """Processes of the run when all nodes are there."""
        return self.nodes * self.processes_per_node

    @property
    def launch_id(self) -> str:
        return launch_id(self.number, self.nonce)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every object of the run."""
        return {**COMMON_LABELS, self.run_label: self.run_id}

    @property
    def selector(self) -> dict[str, str]:
        """Labels that select the pods of the run."""
        return run_selector(self.run_id, self.run_label)

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


class Workload(Protocol):
    """A way to run pods: one module in workloads/, one row in registry.WORKLOADS."""

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


def find_workload(launch: LaunchSection) -> Workload:
    workload: Workload = registry.resolve("launch.kind", launch.kind, registry.WORKLOADS)
    return workload


def plan_job(
    config: Config,
    work: Work = Work(),  # noqa: B008 (frozen)
    number: int = 1,
    nonce: str = "",
    *,
    run_label: str = RUN_LABEL,
    is_launched: bool = False,
) -> JobPlan:
    """Pure, but for the run id that is made where none is given. The same config gives the same plan. `is_launched`: it
    is on the cluster already, where refusing it for a secret would only be in the way of removing it."""
    launch = config.launch
    workload = find_workload(launch)
    run_id = launch.name or config.output.run_id or new_run_id(config.run.name)
    if launch.name and config.output.run_id not in (None, launch.name):
        raise UsageError(
            f"launch.name is {launch.name} but output.run_id is {config.output.run_id}: a job is named as its run.",
            remedy="Give one of them, or both the same.",
        )
    min_nodes, nodes = launch.node_range
    master_addr = workload.master_addr(run_id, launch)
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
        container=workload.container,
        master_addr=master_addr,
        config_text=dump_config(resolved),
        command=_command(config, work, run_id, master_addr, launch_id(number, nonce)),
        ports_outside=_ports_outside(resolved, work, is_fetching or work.mode in ("command", "hold")),
        is_fetching=is_fetching,
        launch=launch,
        work=work,
        number=number,
        nonce=nonce,
        run_label=run_label,
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
    at = ["--master-addr", master_addr, "--master-port", str(launch.master_port)]
    return [*at, *backend, "--rdzv-id", run_id]


def _torchrun(config: Config, own: list[str], run_id: str, master_addr: str) -> list[str]:
    """Which node it is, Kubernetes puts in: the value of $(NAME)."""
    launch = config.launch
    at = f"{master_addr}:{launch.master_port}"
    index = find_workload(launch).index_variable(launch)
    fewest, most = launch.node_range
    meeting = (
        ["--rdzv-backend=c10d", f"--rdzv-endpoint={at}", f"--rdzv-id={run_id}"]
        if fewest < most or config.distributed.rendezvous.backend == "c10d"
        else [f"--node-rank=$({index})", f"--master-addr={master_addr}", f"--master-port={launch.master_port}"]
    )
    sizes = [f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.processes_per_node}"]
    return ["torchrun", *sizes, *meeting, "--no-python", *own]


def _in_the_pod(config: Config, run_id: str) -> Config:
    """The config as pods read it."""
    config = config.with_values("output", run_id=run_id, root_dir=config.launch.runs_volume.mount_path)
    config = config.with_values("launch", name=run_id)
    config = config.with_values("distributed", **dict.fromkeys(PLACE_FIELDS))
    if config.launch.tracking_uri:
        config = config.with_values("mlflow", tracking_uri=config.launch.tracking_uri)
    return config


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
    at_work = [
        volume.mount_path for volume in launch.volumes.values() if f"{volume.mount_path}/".startswith(f"{WORK_DIR}/")
    ]
    if work.mode == "hold" and at_work:
        raise UsageError(
            f"A volume is mounted at {at_work[0]}, but pods that are held have their files in {WORK_DIR}.",
            remedy="Mount the volume elsewhere (mount_path).",
        )
    if launch.kind == "stateful_set" and work.launcher == "torchrun":
        raise UsageError(
            "A StatefulSet starts pods again when they end, and under torchrun nothing keeps them from ending.",
            remedy="Use another --kind, or --launcher llmtrain.",
        )
    _check_rendezvous(config, work, master_addr)
    longest = f"{master_addr.partition('.')[0].removesuffix('0')}{nodes - 1}"
    if len(longest) > NAME_LIMIT:
        raise UsageError(f"{longest} must fit in {NAME_LIMIT} characters.", remedy="Give a shorter launch.name.")
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
    pod_0 = f"{master_addr}:{launch.master_port}"
    if wanted.backend in ("static", "c10d") and wanted.endpoint not in (None, pod_0):
        raise UsageError(
            f"distributed.rendezvous.endpoint is {wanted.endpoint}, but with {wanted.backend} pods meet at pod 0, "
            f"{pod_0}.",
            remedy="Leave it out (launch.master_port sets the port), or use etcd-v2 for a server of its own.",
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
    of_launch = ("launch.tracking_uri", launch.tracking_uri)
    rows = {
        "train": [of_launch, ("mlflow.tracking_uri", config.mlflow.tracking_uri), in_env] * config.mlflow.enabled,
        "command": [in_env, of_launch],
        "hold": [in_env, of_launch],
    }
    return next(((field, uri) for field, uri in rows.get(work.mode, []) if uri), None)


def _tracking_warnings(config: Config, work: Work) -> list[str]:
    """A store in a directory that is gone with the pod, or that it cannot write."""
    field, uri = _tracking(config, work) or ("", None)
    folder = local_folder(uri) if uri else None
    kept = {
        name: volume.mount_path
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
        is_path = reference is not None and (model.local_files_only or looks_like_path(reference))
        return [reference] if reference and is_path else []

    paths = {
        "model.path": here(model.path),
        "model.tokenizer_path": here(model.tokenizer_path),
        "model.init": [model.init] if model.init != "random" else [],
        "data.files": data.files,
        "data.val_files": data.val_files,
        "data.train_file": [data.train_file] if data.train_file else [],
        "data.val_file": [data.val_file] if data.val_file else [],
        "data.dataset_name": [data.dataset_name] if data.dataset_name and looks_like_path(data.dataset_name) else [],
        "data.tokenizer": [data.tokenizer] if data.tokenizer not in (None, "byte", "char", "gpt2") else [],
    }
    mounts = {name: volume.mount_path for name, volume in launch.volumes.items()}
    seen = ", ".join(f"{path} ({name}_volume)" for name, path in mounts.items())
    warnings = [
        f"{field} {path} is not on a volume: unless the image {launch.image} has it, pods will not find it. They see "
        f"{seen}."
        for field, values in paths.items()
        for path in values
        if not any(f"{path}/".startswith(f"{mount}/") for mount in mounts.values())
    ]
    cache = data.cache_dir
    writable = [*mounts.values(), "/tmp", "/cache"]
    if cache.startswith("/") and not any(f"{cache}/".startswith(f"{mount}/") for mount in writable):
        warnings.append(
            f"data.cache_dir {cache} cannot be written in a pod. It may lie on a volume, or below ~ or /tmp."
        )
    return warnings + tracking
