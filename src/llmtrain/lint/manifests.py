"""Manifests as the rules see them: a Workload has groups of pods with one template each. The differences between kinds
are handled here, so that rules need not know them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from llmtrain.lint.container_command import Container
from llmtrain.lint.yaml_nodes import Node

RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
OPERATOR_KINDS = ("PyTorchJob", "TrainJob", *RUNTIMES)
JOBSET_KINDS = ("JobSet", *RUNTIMES)
REPLICATED = ("StatefulSet", "Deployment", "ReplicaSet", "DaemonSet")
# Variables of distributed training. RANK is not one of them: many programs have ranks.
RENDEZVOUS_VARIABLES = (
    "MASTER_ADDR",
    "PET_MASTER_ADDR",
    "PET_RDZV_ENDPOINT",
    "RDZV_ENDPOINT",
    "PET_NNODES",
    "NNODES",
    "WORLD_SIZE",
)
RENDEZVOUS_FLAGS = (
    "rdzv-endpoint",
    "rdzv-backend",
    "master-addr",
    "nnodes",
    "main-process-ip",
    "num-machines",
    "hostfile",
)
_TRAINING = re.compile(
    r"\btrain(?:ing|er)?\b|\btrain\w*\.py\b|_train\.py\b|\bfine_?tun\w*|\bpretrain\w*", re.IGNORECASE
)
_TRAINING_PROGRAM = re.compile(
    r"\b\w{0,60}(?:train|fine_?tun)\w{0,60}\.py\b|\bllmtrain\s+(?:train|node)\b|\s-m\s+(?!llmtrain\b)[\w.]{0,60}train",
    re.IGNORECASE,
)
_IMAGES = re.compile(r"pytorch|torch|deepspeed|llmtrain|nemo", re.IGNORECASE)
ANY = "*"
"""The value of a label that the cluster sets."""


@dataclass(frozen=True)
class Pod:
    """A group of pods with one template."""

    workload: "Workload"
    template: Node
    count: int | None
    """Number of pods; None if the files do not contain it."""
    role: str = ""
    job: Node | None = None
    """The spec of the Job that creates them."""
    is_complete: bool = True
    """False for a TrainJob: the rest of its template is in the runtime."""

    @property
    def spec(self) -> Node:
        return self.template.get("spec")

    @cached_property
    def containers(self) -> list[Container]:
        if not self.is_complete:
            return [Container(self.template)]
        return [Container(node) for node in self.spec.get("containers")]

    @cached_property
    def all_containers(self) -> list[Container]:
        return [*(Container(node, True) for node in self.spec.get("initContainers")), *self.containers]

    @cached_property
    def is_distributed(self) -> bool:
        """Whether its processes connect to those of other pods. torchrun alone does not imply that: each pod may
        search for hyperparameters independently."""
        if self.workload.kind in OPERATOR_KINDS:
            return self.role not in ("dataset-initializer", "model-initializer")
        return any(
            (any(n in c.variables for n in RENDEZVOUS_VARIABLES) or any(n in c.flags for n in RENDEZVOUS_FLAGS))
            and "standalone" not in c.flags
            for c in self.containers
        )

    @cached_property
    def has_training_program(self) -> bool:
        """Whether it runs a program named after training. Stricter than is_training: a server may need GPUs too."""
        return any(_TRAINING_PROGRAM.search(c.command_line) for c in self.containers)

    @cached_property
    def is_training(self) -> bool:
        return self.is_distributed or any(
            c.gpus or c.is_torchrun or _TRAINING.search(c.command_line) or _IMAGES.search(c.node.get("image").text)
            for c in self.containers
            if "llmtrain guard" not in c.command_line
        )

    @property
    def is_multi_node(self) -> bool:
        """Whether several pods train together. False if the number is unknown, to avoid false alarms."""
        nodes = self.workload.nodes
        return self.is_distributed and nodes is not None and nodes > 1

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change (`1:4`)."""
        sizes = [s for c in self.containers for s in c.settings(("nnodes", "nodes"), ("PET_NNODES", "NNODES"))]
        return any(re.fullmatch(r"\d+:\d+", each.value) and len(set(each.value.split(":"))) == 2 for each in sizes)

    @cached_property
    def sizes(self) -> set[int]:
        """Numbers of nodes that are correct; empty if unknown. A master and its workers may be two Jobs, or the master
        may be in another file."""
        nodes, kind = self.workload.nodes, self.workload.kind
        if nodes is None or kind in ("Pod", "PodTemplate", "DaemonSet") or self._has_external_master():
            return set()
        if kind in OPERATOR_KINDS:
            return {nodes}
        return {nodes, self.workload.manifests.plain_nodes(self.workload.namespace)}

    def _has_external_master(self) -> bool:
        hosts = {host.partition(".")[0] for host, _, _ in self.endpoints}
        if self.workload.kind not in ("Job", "StatefulSet", "Deployment") or not hosts:
            return False
        return not any(self._is_here(host) for host in hosts)

    def _is_here(self, host: str) -> bool:
        """Whether a name may resolve to these pods: their own names, their Service, or one that selects nothing."""
        if re.fullmatch(rf"{re.escape(self.workload.name)}-\d+", host) or host == self.subdomain.text:
            return True
        service = self.workload.manifests.service(host, self.workload)
        selected = self.workload.manifests.selected(service) if service is not None else []
        return service is not None and (not selected or any(pod is self for pod in selected))

    @property
    def processes(self) -> int | None:
        """Processes per pod."""
        if self.workload.processes.exists:
            return self.workload.processes.number
        counts = [container.processes for container in self.containers if container.is_launched] or [1]
        return counts[0]

    @cached_property
    def labels(self) -> dict[str, str]:
        """Labels of the template, and those that the cluster adds."""
        own = {key: node.text for key, node in self.template.get("metadata", "labels").items()}
        return {**_cluster_labels(self), **own}

    def matches(self, selector: Node) -> bool:
        if not self.is_complete and self.workload.runtime is None:
            return True  # its labels are in a runtime in another file
        wanted = list(selector.items())
        return bool(wanted) and all(self.labels.get(key) in (value.text, ANY) for key, value in wanted)

    @property
    def subdomain(self) -> Node:
        """The name of the Service that provides the DNS names of its pods."""
        if self.workload.kind == "StatefulSet":
            return self.workload.node.get("spec", "serviceName")
        if self.workload.kind == "JobSet":
            network = self.workload.node.get("spec", "network", "subdomain")
            return network if network.exists else self.workload.node.get("metadata", "name")
        return self.spec.get("subdomain")

    @property
    def endpoints(self) -> Iterator[tuple[str, int, Node]]:
        """(host, line, node) of each literal rendezvous address."""
        for container in self.containers:
            for setting in container.settings(("rdzv-endpoint", "master-addr"), RENDEZVOUS_VARIABLES[:4]):
                host = re.sub(r":\d+$|:\$.*$", "", setting.value.removeprefix("tcp://"))
                if host and "$" not in host and setting.is_literal:
                    yield host, setting.line, setting.node


@dataclass(frozen=True)
class Workload:
    node: Node
    manifests: "Manifests"

    @property
    def kind(self) -> str:
        return self.node.get("kind").text

    @property
    def name(self) -> str:
        return self.node.get("metadata", "name").text

    @property
    def namespace(self) -> str:
        return self.node.get("metadata", "namespace").text

    @cached_property
    def pods(self) -> list[Pod]:
        return list(_pods(self))

    @cached_property
    def nodes(self) -> int | None:
        """Number of pods that train together."""
        if self.kind == "TrainJob":
            own = self.node.get("spec", "trainer", "numNodes").number
            return own if own or self.runtime is None else self.runtime.nodes
        if self.kind in RUNTIMES:
            asked = [w for w in self.manifests.train_jobs if w.runtime is self]
            numbers = [w.node.get("spec", "trainer", "numNodes").number for w in asked]
            return max((n for n in numbers if n), default=self.node.get("spec", "mlPolicy", "numNodes").number)
        counts = [pod.count for pod in self.pods if pod.is_distributed or len(self.pods) == 1]
        return None if None in counts or not counts else sum(count or 0 for count in counts)

    @property
    def processes(self) -> Node:
        """The field with the number of processes per pod, if the kind has one."""
        spec = self.node.get("spec")
        if self.kind == "PyTorchJob":
            return spec.get("nprocPerNode")
        if self.kind == "TrainJob":
            own = spec.get("trainer", "numProcPerNode")
            return own if own.exists or self.runtime is None else self.runtime.processes
        return spec.get("mlPolicy", "torch", "numProcPerNode") if self.kind in RUNTIMES else Node(None, 0, spec.source)

    @cached_property
    def runtime(self) -> "Workload | None":
        """The runtime of a TrainJob, if it is in the files."""
        wanted = self.node.get("spec", "runtimeRef", "name").text
        return self.manifests.runtimes.get(wanted)


@dataclass(frozen=True)
class Manifests:
    """The objects of all files: a Service may be in another file than its pods."""

    objects: list[Node]

    def of_kind(self, kind: str) -> list[Node]:
        return self._by_kind.get(kind, [])

    @cached_property
    def _by_kind(self) -> dict[str, list[Node]]:
        found: dict[str, list[Node]] = {}
        for node in self.objects:
            found.setdefault(node.get("kind").text, []).append(node)
        return found

    @cached_property
    def workloads(self) -> list[Workload]:
        return [Workload(node, self) for node in self.objects if node.get("kind").text in KINDS]

    @cached_property
    def pods(self) -> list[Pod]:
        return [pod for workload in self.workloads for pod in workload.pods]

    @cached_property
    def runtimes(self) -> dict[str, Workload]:
        return {one.name: one for one in self.workloads if one.kind in RUNTIMES}

    @cached_property
    def train_jobs(self) -> list[Workload]:
        return [one for one in self.workloads if one.kind == "TrainJob"]

    def plain_nodes(self, namespace: str) -> int:
        """Number of distributed pods without an operator in a namespace."""
        counts = self._nodes_by_namespace
        return sum(counts.values()) if not namespace else counts.get(namespace, 0) + counts.get("", 0)

    @cached_property
    def _nodes_by_namespace(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for one in self.workloads:
            if one.kind not in OPERATOR_KINDS and any(pod.is_distributed for pod in one.pods):
                counts[one.namespace] = counts.get(one.namespace, 0) + (one.nodes or 0)
        return counts

    def training(self) -> Iterator[Pod]:
        return (pod for pod in self.pods if pod.is_training)

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[Node]]:
        found: dict[tuple[str, str], list[Node]] = {}
        for node in self.objects:
            found.setdefault((node.get("kind").text, node.get("metadata", "name").text), []).append(node)
        return found

    def beside(self, workload: Workload, kind: str, name: str) -> Node | None:
        """The object of this name in the namespace of the workload."""
        return next((n for n in self._by_name.get((kind, name), []) if same_namespace(n, workload.node)), None)

    def service(self, name: str, workload: Workload) -> Node | None:
        return self.beside(workload, "Service", name)

    def selected(self, service: Node) -> list[Pod]:
        """The pods that a Service selects; looked up by its first label, because there may be thousands of both."""
        selector = service.get("spec", "selector")
        key, value = next(((key, node.text) for key, node in selector.items()), ("", ""))
        nearby = [pod for row in ((key, value), (key, ANY), ("", ANY)) for pod in self._by_label.get(row, [])]
        return [pod for pod in nearby if same_namespace(service, pod.workload.node) and pod.matches(selector)]

    @cached_property
    def _by_label(self) -> dict[tuple[str, str], list[Pod]]:
        """Pods by each of their labels; pods with unknown labels under an empty key."""
        found: dict[tuple[str, str], list[Pod]] = {}
        for pod in self.pods:
            rows = list(pod.labels.items()) if pod.is_complete else [("", ANY)]
            for row in rows:
                found.setdefault(row, []).append(pod)
        return found


def same_namespace(one: Node, other: Node) -> bool:
    """A missing namespace matches any: it is decided when the files are applied."""
    names = {node.get("metadata", "namespace").text for node in (one, other)} - {""}
    return len(names) < 2


def _pods(workload: Workload) -> Iterator[Pod]:
    node, spec = workload.node, workload.node.get("spec")
    kind = workload.kind
    if kind == "Pod":
        yield Pod(workload, node, 1)
    elif kind == "PodTemplate":
        yield Pod(workload, node.get("template"), None)
    elif kind in REPLICATED:
        count = spec.get("replicas").number if spec.get("replicas").exists else 1
        yield Pod(workload, spec.get("template"), None if kind == "DaemonSet" else count)
    elif kind in ("Job", "CronJob"):
        job = spec if kind == "Job" else spec.get("jobTemplate", "spec")
        yield Pod(workload, job.get("template"), _job_size(job), "", job)
    elif kind == "PyTorchJob":
        for role, replica in spec.get("pytorchReplicaSpecs").items():
            count = replica.get("replicas").number if replica.get("replicas").exists else 1
            yield Pod(workload, replica.get("template"), count, role)
    elif kind == "TrainJob":
        yield Pod(workload, spec.get("trainer"), workload.nodes, is_complete=False)
    else:
        yield from _replicated_jobs(workload, spec if kind == "JobSet" else spec.get("template", "spec"))


def _replicated_jobs(workload: Workload, spec: Node) -> Iterator[Pod]:
    for row in spec.get("replicatedJobs"):
        job = row.get("template", "spec")
        size = _job_size(job)
        copies = row.get("replicas").number if row.get("replicas").exists else 1
        count = size * copies if size is not None and copies is not None and workload.kind == "JobSet" else None
        yield Pod(workload, job.get("template"), count, row.get("name").text, job)


def _job_size(job: Node) -> int | None:
    """Number of pods that run at once: the larger of completions and parallelism."""
    numbers = [job.get(name) for name in ("completions", "parallelism") if job.get(name).exists]
    if any(node.number is None for node in numbers):
        return None
    return max((node.number or 0 for node in numbers), default=1)


def _cluster_labels(pod: Pod) -> dict[str, str]:
    name, kind = pod.workload.name, pod.workload.kind
    labels: dict[str, str] = {}
    if pod.job is not None:
        job_name = name if kind == "Job" else ANY
        index = "batch.kubernetes.io/job-completion-index"
        labels = {"batch.kubernetes.io/job-name": job_name, "job-name": job_name, index: ANY}
        labels |= {"batch.kubernetes.io/controller-uid": ANY, "controller-uid": ANY}
    if kind in JOBSET_KINDS:
        labels |= {"jobset.sigs.k8s.io/jobset-name": name if kind == "JobSet" else ANY}
        labels |= {"jobset.sigs.k8s.io/replicatedjob-name": pod.role}
        labels |= {f"jobset.sigs.k8s.io/{key}": ANY for key in ("job-index", "job-key", "replicatedjob-replicas")}
    if kind == "PyTorchJob":
        role = pod.role.lower()
        labels = {"training.kubeflow.org/job-name": name, "training.kubeflow.org/replica-type": role}
        labels |= {"training.kubeflow.org/replica-index": ANY, "training.kubeflow.org/operator-name": ANY}
        labels |= {"training.kubeflow.org/job-role": role}
    if kind == "StatefulSet":
        labels = {"statefulset.kubernetes.io/pod-name": ANY, "apps.kubernetes.io/pod-index": ANY}
    return labels


KINDS = ("Job", "CronJob", "Pod", "PodTemplate", "JobSet", *REPLICATED, *OPERATOR_KINDS)
"""Kinds that are checked; others are skipped."""
