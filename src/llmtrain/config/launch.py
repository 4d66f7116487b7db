"""The `launch` section: how a run is launched on Kubernetes."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from llmtrain import registry
from llmtrain.config.extra_volumes import env_in, extra_volume_problems
from llmtrain.config.kubernetes_types import (
    AUTO,
    MOUNT_PATH_PATTERN,
    AccessMode,
    Annotations,
    Capability,
    EnvVariables,
    KubeName,
    Labels,
    MountPath,
    Namespace,
    NodeCount,
    Quantity,
    QuantityOrAuto,
    Spread,
    UserId,
    amount,
    not_json,
)
from llmtrain.config.section import CountOrZero, Names, PositiveInt, Problem, Section, Text
from llmtrain.core.redact import has_secret, is_secret_setting

SINGLE_NODE_MODES = ("ReadWriteOnce", "ReadWriteOncePod")
# Labels that llmtrain, Kubernetes or an operator sets and selects pods by.
RESERVED_LABELS = (
    *("app", "app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by"),
    *("job-name", "controller-uid", "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"),
)
OWN_RESOURCES = ("cpu", "memory", "ephemeral-storage")  # they have fields of their own
OWN_PREFIXES = ("llmtrain", "llmtrain.dev")
RESERVED_PREFIXES = (
    *OWN_PREFIXES,
    *("batch.kubernetes.io", "apps.kubernetes.io", "statefulset.kubernetes.io"),
    *("training.kubeflow.org", "jobset.sigs.k8s.io"),
)
RESERVED_PATHS = ("/config", "/tmp", "/cache", "/dev", "/proc", "/sys")


class ResourcesSection(Section):
    """Resource requests and limits of each pod."""

    cpu: Quantity = "2"
    """CPU cores per pod, such as 8 or 500m."""
    memory: QuantityOrAuto = "4Gi"
    """Memory per pod, including shared memory. `auto` takes it from an estimate when the run is launched."""
    gpus: CountOrZero = 0
    """GPUs per pod: 0, or one per process."""
    gpu_resource: Text = "nvidia.com/gpu"
    """Resource name of the GPUs."""
    shm_size: Quantity = "1Gi"
    """Size of /dev/shm, which data workers and NCCL use. Kubernetes' own default is 64 MB."""
    ephemeral_storage: Quantity | None = None
    """Local disk per pod, for /tmp, /cache and logs. null requests none and sets no limit."""
    extra: dict[str, Quantity] = {}
    """Other resources per pod, such as `vpc.amazonaws.com/efa`, `rdma/ib` or `hugepages-2Mi`."""


class VolumeSection(Section):
    """A volume of every pod: an existing claim, or a size for one that is created."""

    claim: KubeName | None = None
    """Existing PersistentVolumeClaim to mount."""
    size: Quantity | None = None
    """Size of a PersistentVolumeClaim to create if `claim` is null."""
    storage_class: KubeName | None = None
    """Storage class of a created claim. null uses the cluster's default."""
    access_mode: AccessMode | None = None
    """Access mode of a created claim. null means ReadWriteMany for several pods, else ReadWriteOnce."""


class RunsVolumeSection(VolumeSection):
    """Volume of all runs, mounted at output.root_dir. All pods read and write it."""

    size: Quantity | None = "10Gi"
    """Size of a PersistentVolumeClaim to create if `claim` is null."""


class DataVolumeSection(VolumeSection):
    """Volume of training files. Not mounted unless a claim or a size is set."""

    mount_path: MountPath = "/data"
    """Mount path in the pods."""
    read_only: bool = True
    """Mount the volume read-only."""


class ModelsVolumeSection(DataVolumeSection):
    """Volume of base models. Not mounted unless a claim or a size is set."""

    mount_path: MountPath = "/models"
    """Mount path in the pods."""


HF_TOKEN = "HF_TOKEN"
"""The variable that all Hugging Face libraries read."""


class HfTokenSection(Section):
    """Secret with a Hugging Face token. The token itself is never part of a config or manifest."""

    name: KubeName | None = None
    """Name of the Secret. null gives pods no token."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "token"
    """Key of the token in the Secret."""
    variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = HF_TOKEN
    """Variable of the token for your own command and interactive pods, such as HUGGING_FACE_HUB_TOKEN."""


class LaunchSection(Section):
    """How `llmtrain launch` runs on Kubernetes. No field here changes the result of a run."""

    kind: Annotated[str, Field(json_schema_extra={"enum": sorted(registry.KINDS)})] = "indexed_job"
    """Kind of the job: `indexed_job` or `stateful_set` (any cluster), `pytorch_job`, `train_job` or `job_set` (require
    their operator)."""
    namespace: Namespace | None = None
    """Namespace of all objects. null uses the namespace of the kubeconfig context."""
    nodes: NodeCount = 1
    """Number of pods, or 'MIN:MAX' for an elastic run."""
    processes_per_node: PositiveInt = 1
    """Training processes per pod; with GPUs, one per GPU."""
    image: Text | None = None
    """Container image with llmtrain installed, which the cluster can pull. Required to launch; `launch --build` builds
    one."""
    image_schema: Literal[2, 3] = 3
    """Config schema that the llmtrain in the image reads. Set 2 for an image from before schema 3."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """Image pull policy."""
    image_pull_secrets: Names = []
    """Names of Secrets for a private registry."""
    resources: ResourcesSection = ResourcesSection()
    """Resource requests and limits of each pod."""
    runs_volume: RunsVolumeSection | None = RunsVolumeSection()
    """Volume of all runs. Several pods require one that all can write (ReadWriteMany). null mounts none: for a command,
    `--doctor` or `--smoke` that leaves no files to keep."""
    data_volume: DataVolumeSection = DataVolumeSection()
    """Volume of training files."""
    models_volume: ModelsVolumeSection = ModelsVolumeSection()
    """Volume of base models."""
    env: EnvVariables = {}
    """Additional environment variables. Put secrets into `env_secrets`."""
    env_secrets: Names = []
    """Names of Secrets whose keys become environment variables, such as credentials for S3 or a tracking server."""
    hf_token_secret: HfTokenSection = HfTokenSection()
    """Secret with the Hugging Face token."""
    node_selector: EnvVariables = {}
    """Labels that a node must have."""
    tolerations: list[dict[str, Any]] = []
    """Tolerations, in Kubernetes syntax."""
    affinity: dict[str, Any] = {}
    """Affinity, in Kubernetes syntax."""
    topology_spread: Spread = True
    """true: prefer to schedule each pod on a different node. Or topologySpreadConstraints in Kubernetes syntax; their
    labelSelector defaults to the pods of the run."""
    labels: Labels = {}
    """Additional labels of all objects of the run and of its pods."""
    annotations: Annotations = {}
    """Additional annotations of the job and its pods."""
    service_account: KubeName | None = None
    """ServiceAccount of the pods, for a cloud identity such as IRSA. Its token is not mounted."""
    runtime_class: KubeName | None = None
    """RuntimeClass of the pods."""
    scheduler_name: KubeName | None = None
    """Scheduler of the pods. null uses the cluster's default scheduler."""
    host_network: bool = False
    """Use the network of the node. At most one pod of the run then fits on a node."""
    run_as_user: UserId | None = None
    """User id of the containers. null means 1000 with `security: restricted`, else the image's user."""
    run_as_group: UserId | None = None
    """Group id of the containers. null means 1000 with `security: restricted`, else the image's group."""
    fs_group: UserId | None = None
    """Group that owns the volumes. null means 1000, with `security: none` the storage's own."""
    capabilities: list[Capability] = []
    """Linux capabilities to add to the training container, such as IPC_LOCK."""
    extra_volumes: list[dict[str, Any]] = []
    """Additional volumes, in Kubernetes syntax: persistentVolumeClaim, secret, configMap, hostPath, nfs, ..."""
    extra_mounts: list[dict[str, Any]] = []
    """Where to mount `extra_volumes`: volumeMounts in Kubernetes syntax."""
    pod_patch: dict[str, Any] = {}
    """Strategic merge patch over the pod template (`metadata` and `spec`), for what has no field of its own. In it,
    `trainer` names the training container of every kind."""
    pod_disruption_budget: bool = False
    """Create a PodDisruptionBudget, so that draining a node waits for the run."""
    priority_class: KubeName | None = None
    """PriorityClass of the pods."""
    queue: KubeName | None = None
    """LocalQueue of Kueue to submit to."""
    queue_priority: KubeName | None = None
    """WorkloadPriorityClass of Kueue. null uses `priority_class`."""
    max_restarts: CountOrZero = 10
    """Number of crashes after which the platform gives up; interruptions do not count. Not supported by
    `stateful_set`. llmtrain itself gives up after three crashes without a new checkpoint."""
    grace_period_sec: PositiveInt = 600
    """Seconds that processes have to save after SIGTERM. Pods are killed one minute later."""
    ttl_sec: CountOrZero | None = None
    """Delete the finished job after this many seconds. null keeps it. Not supported by `stateful_set` and
    `train_job`."""
    active_deadline_sec: PositiveInt | None = None
    """Terminate the job after this many seconds, finished or not. null means never. Not supported by
    `stateful_set`."""
    pytorch_master: bool = False
    """Add a Master replica to a `pytorch_job`. The operator then adds an init container with another image, which
    namespaces with the restricted Pod Security Standard reject."""
    security: Literal["restricted", "baseline", "none"] = "restricted"
    """Pod Security Standard to comply with. `restricted`: user 1000, a read-only root file system, no capabilities.
    `baseline`: the image's own user and a writable root file system. `none`: no security context."""
    network_policy: bool = True
    """Create a NetworkPolicy: pods reach only pods of the same run, DNS, and the Hub or tracking server if used."""
    pod_monitor: bool = False
    """Create a PodMonitor of the Prometheus Operator, for tracking.prometheus. `labels` adds those by which your
    Prometheus selects PodMonitors."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most pods."""
        fewest, _, most = str(self.nodes).partition(":")
        return int(fewest), int(most or fewest)

    @property
    def volumes(self) -> dict[str, RunsVolumeSection | DataVolumeSection]:
        """Volumes that are mounted, by name."""
        volumes: dict[str, RunsVolumeSection | DataVolumeSection | None] = {
            "runs": self.runs_volume,
            "data": self.data_volume,
            "models": self.models_volume,
        }
        return {name: volume for name, volume in volumes.items() if volume and (volume.claim or volume.size)}

    def mounts(self, runs_path: str) -> dict[str, str]:
        """Mount paths of these volumes, by name. The runs volume is mounted at `runs_path`."""
        paths = {}
        for name, volume in self.volumes.items():
            paths[name] = runs_path
            if isinstance(volume, DataVolumeSection):
                paths[name] = volume.mount_path
        return paths

    def problems(self) -> Iterator[Problem]:
        problem = registry.check_name("launch.kind", self.kind, registry.KINDS)
        if problem:
            yield ("kind",), problem
        fewest, most = self.node_range
        if fewest > most:
            yield ("nodes",), f"launch.nodes must be MIN:MAX with MIN <= MAX, got {self.nodes}."
        yield from self._resource_problems()
        yield from self._volume_problems(most)
        yield from self._pod_problems()
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
                yield ("env",), f"launch.env: {name!r} is not a valid name of an environment variable."
        if self.queue_priority and not self.queue:
            yield ("queue", "queue_priority"), "launch.queue_priority requires launch.queue. Set it, or leave both out."
        if not problem:
            yield from self._unsupported_fields()

    def _unsupported_fields(self) -> Iterator[Problem]:
        for field in ("ttl_sec", "active_deadline_sec"):
            # The kind is only imported if such a field is set: it is not needed to train.
            if getattr(self, field) is None:
                continue
            if field in registry.resolve("launch.kind", self.kind, registry.KINDS).unsupported_fields:
                yield ("kind", field), f"launch.{field} is not supported by launch.kind {self.kind}. Leave it out."

    def _resource_problems(self) -> Iterator[Problem]:
        resources = self.resources
        is_auto = resources.memory == AUTO
        for name in ("cpu", "memory", "shm_size"):
            quantity = getattr(resources, name)
            if quantity != AUTO and not amount(quantity):
                yield ("resources",), f"launch.resources.{name} must be greater than 0."
        if not is_auto and amount(resources.shm_size) >= amount(resources.memory):
            yield (
                ("resources",),
                f"launch.resources.shm_size {resources.shm_size} must be below launch.resources.memory "
                f"{resources.memory}, which includes shared memory. Raise memory, or lower shm_size.",
            )
        for name in {*OWN_RESOURCES, resources.gpu_resource} & set(resources.extra):
            yield ("resources",), f"launch.resources.extra.{name} has a field of its own in launch.resources. Use that."
        if resources.gpus and resources.gpus != self.processes_per_node:
            yield (
                ("resources", "processes_per_node"),
                f"launch.resources.gpus is {resources.gpus}, but launch.processes_per_node is "
                f"{self.processes_per_node}. Make them equal: each process uses one GPU.",
            )

    def _volume_problems(self, pods: int) -> Iterator[Problem]:
        if self.runs_volume and "runs" not in self.volumes:
            yield (
                ("runs_volume",),
                "launch.runs_volume has neither claim nor size, so the run would be lost with its pods. Set one, or "
                "launch.runs_volume: null for a command that leaves no files to keep.",
            )
        for name, volume in self.volumes.items():
            field = f"launch.{name}_volume"
            if pods > 1 and volume.access_mode in SINGLE_NODE_MODES:
                yield (
                    (f"{name}_volume", "nodes"),
                    f"{field}.access_mode {volume.access_mode} can be mounted on a single node, but launch.nodes is "
                    f"{self.nodes}. Use ReadWriteMany with a storage class that supports it (NFS, CephFS, EFS, "
                    "Filestore, ...), or one pod.",
                )
            if name == "runs" and volume.access_mode == "ReadOnlyMany":
                yield ("runs_volume",), f"{field}.access_mode ReadOnlyMany is not writable. Use ReadWriteMany."
            if isinstance(volume, DataVolumeSection) and volume.read_only and not volume.claim:
                yield (
                    (f"{name}_volume",),
                    f"{field} would create an empty read-only volume. Set {field}.claim to an existing claim, or "
                    f"{field}.read_only to false.",
                )
        yield from extra_volume_problems(self.extra_volumes, self.extra_mounts)
        # The path of the runs volume is output.root_dir, which launch checks together with these.
        mounts = {name: path for name, path in self.mounts("").items() if name != "runs"}
        for name, text in mount_problems(mounts):
            yield (f"{name}_volume",), text

    def _pod_problems(self) -> Iterator[Problem]:
        for name in self.labels:
            if name in RESERVED_LABELS or name.partition("/")[0] in RESERVED_PREFIXES:
                yield ("labels",), f"launch.labels.{name} is set by llmtrain or Kubernetes. Choose another key."
        for name in self.annotations:
            if name.partition("/")[0] in OWN_PREFIXES:
                yield ("annotations",), f"launch.annotations.{name} is set by llmtrain. Choose another key."
        if self.security == "restricted" and self.run_as_user == 0:
            yield (
                ("run_as_user", "security"),
                "launch.run_as_user 0 is root, which launch.security restricted forbids. Set launch.security to "
                "baseline, or another user.",
            )
        for name in set(self.pod_patch) - {"metadata", "spec"}:
            yield (
                ("pod_patch",),
                f"launch.pod_patch.{name} is not part of a pod template. Known: metadata, spec.",
            )
        for field in ("affinity", "extra_mounts", "extra_volumes", "pod_patch", "tolerations", "topology_spread"):
            for text in not_json(getattr(self, field), f"launch.{field}"):
                yield (field,), text

    def secret_problems(self) -> Iterator[Problem]:
        """Secrets that would be readable in a manifest. Not part of `problems`: the config of a run that is already on
        the cluster must stay readable."""
        variables = [(f"env.{name}", name, value) for name, value in self.env.items()]
        variables += [(f"pod_patch: the variable {name}", name, value) for name, value in env_in(self.pod_patch)]
        for where, name, value in variables:
            if is_secret_setting(name, value) or has_secret(value):
                yield (
                    ("env", "pod_patch"),
                    f"launch.{where} looks like a secret, which every manifest would show. Put it into a Secret: "
                    "launch.hf_token_secret for a Hugging Face token, launch.env_secrets for others.",
                )


def mount_problems(mounts: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(volume, problem) for each mount path that is below a path of the pod or of an earlier volume."""
    taken = {path: path for path in RESERVED_PATHS}
    for name, path in mounts.items():
        field = f"launch.{name}_volume.mount_path"
        if name == "runs":
            field = "output.root_dir"
        if not re.fullmatch(MOUNT_PATH_PATTERN, path):
            yield name, f"{field} must be a mount path of letters, digits, '.', '_' and '-', got {path!r}."
        for other, user in taken.items():
            if f"{path}/".startswith(f"{other}/"):
                yield name, f"{field} {path} is already used in pods by {user}. Choose another path."
                break
        taken[path] = field
