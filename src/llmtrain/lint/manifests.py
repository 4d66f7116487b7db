"""Manifests as the rules see them: a Workload has groups of pods with one template each, and a Service selects pods by
their labels, perhaps in another file."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from llmtrain.lint.container_command import Container
from llmtrain.lint.kinds import ANY, KINDS, OPERATOR_KINDS, RUNTIMES, PodGroup, cluster_labels, pod_groups
from llmtrain.lint.training_signs import (
    RENDEZVOUS_VARIABLES,
    RUN_LABEL,
    has_rendezvous,
    runs_training_program,
    seems_to_train,
)
from llmtrain.lint.yaml_nodes import Node

OPERATOR_CONTAINERS = ("pytorch", "node")
"""What the operators call the training container of a PyTorchJob and of a runtime."""
ENFORCED_LEVEL = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True)
class Pod(PodGroup):
    """Pods with one template, and what the template says about training."""

    workload: "Workload" = field(kw_only=True)
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
        init_containers = [Container(node, is_init=True) for node in self.spec.get("initContainers")]
        return [*init_containers, *self.containers]

    @property
    def sidecars(self) -> list[Container]:
        """Containers beside those that train. None if it is not known which one does."""
        others = [one for one in self.containers if not (seems_to_train(one) or has_rendezvous(one))]
        if len(others) == len(self.containers):
            others = [one for one in self.containers if one.name not in OPERATOR_CONTAINERS]
        if len(others) == len(self.containers):
            return []
        return others

    @cached_property
    def is_distributed(self) -> bool:
        """Whether its processes connect to those of other pods. torchrun alone does not imply that: each pod may
        search for hyperparameters independently."""
        if self.workload.kind in OPERATOR_KINDS:
            return self.role not in ("dataset-initializer", "model-initializer")
        return any(has_rendezvous(container) for container in self.containers)

    @cached_property
    def has_training_program(self) -> bool:
        return any(runs_training_program(container) for container in self.containers)

    @cached_property
    def is_training(self) -> bool:
        # Pods of `llmtrain launch --hold` wait for their files and commands.
        if RUN_LABEL in self.labels:
            return True
        return self.is_distributed or any(seems_to_train(container) for container in self.containers)

    @property
    def is_multi_node(self) -> bool:
        """Whether several pods train together. False if the number is unknown, to avoid false alarms."""
        nodes = self.workload.nodes
        return self.is_distributed and nodes is not None and nodes > 1

    @property
    def is_elastic(self) -> bool:
        """Whether the number of nodes may change (`1:4`)."""
        for container in self.containers:
            for setting in container.settings(("nnodes", "nodes"), ("PET_NNODES", "NNODES")):
                match = re.fullmatch(r"(\d+):(\d+)", setting.value)
                if match and match[1] != match[2]:
                    return True
        return False

    @cached_property
    def sizes(self) -> set[int]:
        """Numbers of nodes that are correct; empty if unknown. A master and its workers may be two Jobs, or the master
        may be in another file."""
        nodes = self.workload.nodes
        kind = self.workload.kind
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
        if service is None:
            return False
        selected = self.workload.manifests.selected(service)
        return not selected or any(pod is self for pod in selected)

    @property
    def processes(self) -> int | None:
        """Processes per pod."""
        if self.workload.processes.exists:
            return self.workload.processes.number
        for container in self.containers:
            if container.is_launched:
                return container.processes
        return 1

    @cached_property
    def labels(self) -> dict[str, str]:
        """Labels of the template, and those that the cluster adds."""
        labels = cluster_labels(self.workload.kind, self.workload.name, self)
        for key, node in self.template.get("metadata", "labels").items():
            labels[key] = node.text
        return labels

    def matches(self, selector: Node) -> bool:
        if not self.is_complete and self.workload.runtime is None:
            return True  # its labels are in a runtime in another file
        for key, value in selector.items():
            if self.labels.get(key) not in (value.text, ANY):
                return False
        return bool(selector.items())  # a Service without a selector selects nothing

    @property
    def subdomain(self) -> Node:
        """The name of the Service that provides the DNS names of its pods."""
        if self.workload.kind == "StatefulSet":
            return self.workload.node.get("spec", "serviceName")
        if self.workload.kind == "JobSet":
            network = self.workload.node.get("spec", "network", "subdomain")
            if network.exists:
                return network
            return self.workload.node.get("metadata", "name")
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
    """An object that creates pods. The word is that of Kubernetes; the files are other people's."""

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

    @property
    def is_in_restricted_namespace(self) -> bool:
        """Whether a namespace in the files enforces Pod Security `restricted` for its pods."""
        for namespace in self.manifests.of_kind("Namespace"):
            metadata = namespace.get("metadata")
            # A namespace that is unset is decided when the files are applied.
            is_same = not self.namespace or metadata.get("name").text == self.namespace
            if is_same and metadata.get("labels", ENFORCED_LEVEL).text == "restricted":
                return True
        return False

    @cached_property
    def pods(self) -> list[Pod]:
        if self.kind == "TrainJob":
            return [Pod(self.node.get("spec", "trainer"), self.nodes, is_complete=False, workload=self)]
        return [Pod(**vars(group), workload=self) for group in pod_groups(self.node)]

    @cached_property
    def nodes(self) -> int | None:
        """Number of pods that train together."""
        if self.kind == "TrainJob":
            number = self.node.get("spec", "trainer", "numNodes").number
            if number or self.runtime is None:
                return number
            return self.runtime.nodes
        if self.kind in RUNTIMES:
            numbers = []
            for job in self.manifests.train_jobs:
                number = job.node.get("spec", "trainer", "numNodes").number
                if job.runtime is self and number:
                    numbers.append(number)
            return max(numbers, default=self.node.get("spec", "mlPolicy", "numNodes").number)
        total = 0
        groups = [pod for pod in self.pods if pod.is_distributed or len(self.pods) == 1]
        for pod in groups:
            if pod.count is None:
                return None
            total += pod.count
        if not groups:
            return None
        return total

    @property
    def processes(self) -> Node:
        """The field with the number of processes per pod, if the kind has one."""
        spec = self.node.get("spec")
        if self.kind == "PyTorchJob":
            return spec.get("nprocPerNode")
        if self.kind == "TrainJob":
            field = spec.get("trainer", "numProcPerNode")
            if field.exists or self.runtime is None:
                return field
            return self.runtime.processes
        if self.kind in RUNTIMES:
            return spec.get("mlPolicy", "torch", "numProcPerNode")
        return Node(None, 0, spec.source)

    @cached_property
    def runtime(self) -> "Workload | None":
        """The runtime of a TrainJob, if it is in the files."""
        wanted = self.node.get("spec", "runtimeRef", "name").text
        return self.manifests.runtimes.get(wanted)


_UNKNOWN_LABELS = ("", ANY)
"""Stands for the labels of a TrainJob's pods, which are in its runtime."""


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
        return {workload.name: workload for workload in self.workloads if workload.kind in RUNTIMES}

    @cached_property
    def train_jobs(self) -> list[Workload]:
        return [workload for workload in self.workloads if workload.kind == "TrainJob"]

    def plain_nodes(self, namespace: str) -> int:
        """Number of distributed pods without an operator in a namespace."""
        counts = self._nodes_by_namespace
        if not namespace:  # it is decided when the files are applied
            return counts.total()
        return counts[namespace] + counts[""]

    @cached_property
    def _nodes_by_namespace(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for workload in self.workloads:
            if workload.kind not in OPERATOR_KINDS and any(pod.is_distributed for pod in workload.pods):
                counts[workload.namespace] += workload.nodes or 0
        return counts

    @cached_property
    def training(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.is_training]

    @cached_property
    def _by_name(self) -> dict[tuple[str, str], list[Node]]:
        found: dict[tuple[str, str], list[Node]] = {}
        for node in self.objects:
            found.setdefault((node.get("kind").text, node.get("metadata", "name").text), []).append(node)
        return found

    def beside(self, workload: Workload, kind: str, name: str) -> Node | None:
        """The object of this name in the namespace of the workload."""
        for node in self._by_name.get((kind, name), []):
            if same_namespace(node, workload.node):
                return node
        return None

    def service(self, name: str, workload: Workload) -> Node | None:
        return self.beside(workload, "Service", name)

    def selected(self, service: Node) -> list[Pod]:
        """The pods that a Service selects; looked up by its first label, because there may be thousands of both."""
        selector = service.get("spec", "selector")
        labels = [_UNKNOWN_LABELS]
        for key, node in selector.items():
            labels += [(key, node.text), (key, ANY)]
            break
        found = []
        for label in labels:
            for pod in self._by_label.get(label, []):
                if same_namespace(service, pod.workload.node) and pod.matches(selector):
                    found.append(pod)
        return found

    @cached_property
    def _by_label(self) -> dict[tuple[str, str], list[Pod]]:
        """Pods by each of their labels."""
        found: dict[tuple[str, str], list[Pod]] = {}
        for pod in self.pods:
            labels = [_UNKNOWN_LABELS]
            if pod.is_complete:
                labels = list(pod.labels.items())
            for label in labels:
                found.setdefault(label, []).append(pod)
        return found


def same_namespace(one: Node, other: Node) -> bool:
    """A missing namespace matches any: it is decided when the files are applied."""
    names = {node.get("metadata", "namespace").text for node in (one, other)} - {""}
    return len(names) < 2
