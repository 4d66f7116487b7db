"""The `launch` section of the config: how a run is put on a Kubernetes cluster."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from llmtrain import registry
from llmtrain.config.section import RUN_ID_PATTERN, CountOrZero, Names, PositiveInt, Problem, Section
from llmtrain.redact import has_secret, is_secret_setting

NAME_LIMIT = 63  # characters of a DNS label, which pod names and label values must fit
SINGLE_NODE_MODES = ("ReadWriteOnce", "ReadWriteOncePod")
NO_TTL = ("stateful_set", "train_job")  # a StatefulSet does not finish, and a TrainJob has no such field

SUFFIXES: dict[str, int | Decimal] = {
    "": 1,
    "m": Decimal("0.001"),
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
}
SUFFIXES |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _as_text(value: object) -> object:
    """A number as the text Kubernetes wants it to be."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _quantity(value: object) -> object:
    text = _as_text(value)
    if isinstance(text, str) and not re.fullmatch(r"[0-9]+(\.[0-9]+)?(m|[kMGTP]|[KMGTP]i)?", text):
        raise PydanticCustomError("quantity", "write a quantity such as 500m, 2 or 4Gi")
    return text


def _nodes(value: object) -> object:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    is_range = isinstance(value, str) and re.fullmatch(r"[1-9][0-9]{0,5}:[1-9][0-9]{0,5}", value)
    if not is_count and not is_range:
        raise PydanticCustomError("nodes", "write a number from 1, or 'MIN:MAX' such as '2:4'")
    return value


def _texts(value: object) -> object:
    return {key: _as_text(item) for key, item in value.items()} if isinstance(value, dict) else value


Quantity = Annotated[str, BeforeValidator(_quantity)]
NodeCount = Annotated[int | str, BeforeValidator(_nodes)]
KubeName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253)]
Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=NAME_LIMIT)]
Folder = Annotated[str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$")]
Text = Annotated[str, Field(min_length=1)]
AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany", "ReadOnlyMany"]
Words = Annotated[dict[str, str], BeforeValidator(_texts)]


def amount(quantity: str) -> Decimal:
    """What a quantity stands for: bytes, or cores."""
    number = quantity.rstrip("mkMGTPi")
    return Decimal(number) * SUFFIXES[quantity[len(number) :]]


class ResourcesSection(Section):
    """What each pod asks for, and may use at most."""

    cpu: Quantity = "2"
    """Cores of a pod, such as 8 or 500m."""
    memory: Quantity = "4Gi"
    """Memory of a pod; what lies in shared memory counts too."""
    gpus: CountOrZero = 0
    """GPUs of a pod: one for each process, or none."""
    gpu_resource: Text = "nvidia.com/gpu"
    """Name under which the cluster hands GPUs out."""
    shm_size: Quantity = "1Gi"
    """Size of /dev/shm, which data workers and NCCL use. Kubernetes alone would give 64 MB."""


class VolumeSection(Section):
    """A volume of every pod: an existing claim, or a size for one that is created."""

    claim: KubeName | None = None
    """Existing claim to mount."""
    size: Quantity | None = None
    """Create a claim of this size for the run instead."""
    storage_class: KubeName | None = None
    """Storage class of a created claim. Empty: the cluster's default."""
    access_mode: AccessMode | None = None
    """How a created claim is shared. Empty: ReadWriteMany for several nodes, else ReadWriteOnce."""


class RunsVolumeSection(VolumeSection):
    """Where runs are kept: all nodes read and write it."""

    size: Quantity | None = "10Gi"
    """Size of the claim that is created where none is named."""
    mount_path: Folder = "/out"
    """Where it is mounted; output.root_dir becomes this."""


class DataVolumeSection(VolumeSection):
    """Files to train on. Not mounted unless a claim or a size is given."""

    mount_path: Folder = "/data"
    """Where it is mounted."""
    read_only: bool = True
    """Pods may not write to it."""


class ModelsVolumeSection(DataVolumeSection):
    """Models to start from. Not mounted unless a claim or a size is given."""

    mount_path: Folder = "/models"
    """Where it is mounted."""


class HfTokenSection(Section):
    """The Secret that holds a Hugging Face token; the token itself is never in a config or manifest."""

    name: KubeName | None = None
    """Name of the Secret. Empty: pods get no token."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "token"
    """Key of the token inside it."""


class LaunchSection(Section):
    """How the run is put on a Kubernetes cluster (`llmtrain launch`). Nothing here changes its result."""

    kind: str = "indexed_job"
    """What runs it: `indexed_job` or `stateful_set` (any cluster), `pytorch_job`, `train_job` or `job_set` (with their
    operator)."""
    name: Annotated[str, Field(pattern=RUN_ID_PATTERN)] | None = None
    """Name of the job, which is the run id. Empty: output.run_id, or made from run.name and the time."""
    namespace: Namespace | None = None
    """Namespace of everything that is made. Empty: that of the kubeconfig's context."""
    nodes: NodeCount = 1
    """Number of pods, or 'MIN:MAX' for a run that goes on with fewer."""
    processes_per_node: PositiveInt = 1
    """Training processes in each pod; with GPUs as many as those."""
    image: Text = "llmtrain:latest"
    """Image that has llmtrain installed."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When a node fetches the image."""
    image_pull_secrets: Names = []
    """Secrets for a private registry, by name."""
    resources: ResourcesSection = ResourcesSection()
    """What each pod asks for."""
    runs_volume: RunsVolumeSection = RunsVolumeSection()
    """Where runs are kept. Several nodes need a volume that all can write (ReadWriteMany)."""
    data_volume: DataVolumeSection = DataVolumeSection()
    """Files to train on."""
    models_volume: ModelsVolumeSection = ModelsVolumeSection()
    """Models to start from."""
    env: Words = {}
    """More environment variables. Secrets do not belong here."""
    env_secrets: Names = []
    """Secrets whose keys become environment variables, by name: logins for S3 or a tracking server."""
    hf_token_secret: HfTokenSection = HfTokenSection()
    """Where the Hugging Face token is."""
    node_selector: Words = {}
    """Labels that a machine must have."""
    tolerations: list[dict[str, Any]] = []
    """Taints that pods bear, as Kubernetes writes them."""
    affinity: dict[str, Any] = {}
    """Affinity of pods, as Kubernetes writes it."""
    topology_spread: bool = True
    """Prefer to put each pod on a machine of its own."""
    pod_disruption_budget: bool = False
    """Let a drained machine wait rather than interrupt the run."""
    priority_class: KubeName | None = None
    """Priority class of the pods."""
    queue: KubeName | None = None
    """Kueue's local queue to wait in."""
    queue_priority: KubeName | None = None
    """Kueue's WorkloadPriorityClass: a run of a higher one may preempt others of its queue. Empty: the priority of the
    pods (`priority_class`)."""
    max_restarts: CountOrZero = 10
    """Crashes after which the platform gives up. Interruptions do not count. (`stateful_set` knows no such number;
    llmtrain itself gives up after three crashes without a newer checkpoint.)"""
    grace_period_sec: PositiveInt = 600
    """How long processes may take to save when told to stop; a pod has a minute more before it is killed."""
    ttl_sec: CountOrZero | None = None
    """Remove the finished job after so long. Empty: never. (Not for `stateful_set` and `train_job`.)"""
    active_deadline_sec: PositiveInt | None = None
    """End the job after so long, finished or not. Empty: never. (Not for `stateful_set`.)"""
    tracking_uri: Text | None = None
    """MLflow server as pods reach it, or a directory on a volume; mlflow.tracking_uri becomes this."""
    master_port: Annotated[int, Field(gt=1023, lt=65536)] = 29500
    """Port on pod 0 where processes meet."""
    pytorch_master: bool = False
    """`pytorch_job`: a Master besides the Workers. The operator then adds an init container that needs another image
    and is refused by a restricted namespace."""
    security: Literal["restricted", "baseline", "none"] = "restricted"
    """What pods may do, by the Pod Security Standards. `restricted`: user 1000, a read-only root file system, no
    capabilities. `baseline`: the image's own user, also root, and a writable root file system. `none`: no security
    context."""
    network_policy: bool = True
    """Let only pods of the same run reach each other; outwards only DNS, and a hub or tracking server where used."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most pods."""
        fewest, _, most = str(self.nodes).partition(":")
        return int(fewest), int(most or fewest)

    @property
    def volumes(self) -> dict[str, RunsVolumeSection | DataVolumeSection]:
        """Those that are mounted, by name."""
        given: dict[str, RunsVolumeSection | DataVolumeSection] = {
            "runs": self.runs_volume,
            "data": self.data_volume,
            "models": self.models_volume,
        }
        return {name: volume for name, volume in given.items() if volume.claim or volume.size}

    def problems(self) -> Iterator[Problem]:
        problem = registry.check_name("launch.kind", self.kind, registry.WORKLOADS)
        if problem:
            yield ("kind",), problem
        fewest, most = self.node_range
        if fewest > most:
            yield ("nodes",), f"launch.nodes {self.nodes} has its first number above the second. Write MIN:MAX."
        longest = f"{self.name}-worker-{most - 1}"
        if self.name and len(longest) > NAME_LIMIT:
            yield ("name", "nodes"), f"launch.name is too long: {longest} must fit in {NAME_LIMIT} characters."
        yield from self._resource_problems()
        yield from self._volume_problems(most)
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
                yield ("env",), f"launch.env: {name!r} is no name of an environment variable."
        if self.queue_priority and not self.queue:
            yield ("queue", "queue_priority"), "launch.queue_priority is for runs in a queue. Name it in launch.queue."
        if self.ttl_sec is not None and self.kind in NO_TTL:
            yield ("kind", "ttl_sec"), f"launch.ttl_sec cannot be kept by launch.kind {self.kind}. Leave it out."
        if self.active_deadline_sec is not None and self.kind == "stateful_set":
            yield (
                ("kind", "active_deadline_sec"),
                "launch.active_deadline_sec cannot be kept by launch.kind stateful_set. Leave it out.",
            )

    def _resource_problems(self) -> Iterator[Problem]:
        ask = self.resources
        for name in ("cpu", "memory", "shm_size"):
            if not amount(getattr(ask, name)):
                yield ("resources",), f"launch.resources.{name} is 0. Ask for some."
        if amount(ask.shm_size) >= amount(ask.memory):
            yield (
                ("resources",),
                f"launch.resources.shm_size {ask.shm_size} leaves nothing of launch.resources.memory {ask.memory}: "
                "shared memory counts against it. Raise memory, or lower shm_size.",
            )
        if ask.gpus and ask.gpus != self.processes_per_node:
            yield (
                ("resources", "processes_per_node"),
                f"launch.resources.gpus is {ask.gpus}, but launch.processes_per_node is {self.processes_per_node}: a "
                "process uses one GPU. Make them equal.",
            )

    def _volume_problems(self, nodes: int) -> Iterator[Problem]:
        paths: dict[str, str] = {path: path for path in ("/config", "/tmp", "/cache", "/dev", "/proc", "/sys")}
        if "runs" not in self.volumes:
            yield (
                ("runs_volume",),
                "launch.runs_volume has neither claim nor size: the run would be lost with its pods. Give one.",
            )
        for name, volume in self.volumes.items():
            field = f"launch.{name}_volume"
            if nodes > 1 and volume.access_mode in SINGLE_NODE_MODES:
                yield (
                    (f"{name}_volume", "nodes"),
                    f"{field}.access_mode {volume.access_mode} can be mounted on one machine only, but there are "
                    f"{nodes} nodes, which all need it. Use ReadWriteMany with a storage class that has it (NFS, "
                    "CephFS, EFS, Filestore, ...), or one node.",
                )
            if name == "runs" and volume.access_mode == "ReadOnlyMany":
                yield ("runs_volume",), f"{field}.access_mode ReadOnlyMany cannot be written. Use ReadWriteMany."
            if isinstance(volume, DataVolumeSection) and volume.read_only and not volume.claim:
                yield (
                    (f"{name}_volume",),
                    f"{field} creates an empty claim that nobody may write. Name an existing claim, or set read_only "
                    "to false.",
                )
            other = next((paths[p] for p in paths if f"{volume.mount_path}/".startswith(f"{p}/")), None)
            if other:
                yield (f"{name}_volume",), f"{field}.mount_path {volume.mount_path} is taken by {other}. Name another."
            paths[volume.mount_path] = field

    def secret_problems(self) -> Iterator[Problem]:
        """What must not get into a manifest. Not among `problems`: a run that was launched by an earlier version must
        be readable all the same."""
        for name, value in self.env.items():
            if is_secret_setting(name, value) or has_secret(value):
                yield (
                    ("env",),
                    f"launch.env.{name} looks like a secret, and would be readable in every manifest. Keep it in a "
                    "Secret (launch.hf_token_secret for a Hugging Face token, launch.env_secrets for others).",
                )
        if self.tracking_uri and has_secret(self.tracking_uri):
            yield (
                ("tracking_uri",),
                "launch.tracking_uri has credentials in it, which every manifest would show. Leave them out.",
            )
