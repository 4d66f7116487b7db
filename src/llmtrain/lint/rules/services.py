"""DNS names of pods: headless Service, subdomain, length of names."""

import re
from collections.abc import Iterable, Iterator

from llmtrain.lint.kinds import KINDS, OPERATOR_KINDS
from llmtrain.lint.manifests import Manifests, Pod
from llmtrain.lint.rules.rule import Match, multi_node_pods, rule, shorten, training_pods
from llmtrain.lint.yaml_nodes import Node

NAME_LIMIT = 63
_CLUSTER_NAME = re.compile(r"(?![\d.]+$)[a-z0-9][-a-z0-9.]*")
RENDEZVOUS_PORTS = (29500, 29400, 23456)
KNOWN_GROUPS = {"kubeflow.org", "trainer.kubeflow.org", "jobset.x-k8s.io"}
"""API groups of operators that create only Services named after their jobs."""
NEED_SERVICE = ("Job", "StatefulSet")
"""Kinds whose pods need a Service in the manifests; operators create their own."""


def _naming_service(pod: Pod) -> Node | None:
    """The Service in the files that provides the DNS name of a pod."""
    if pod.workload.kind not in NEED_SERVICE or not pod.subdomain.text:
        return None
    return pod.workload.manifests.service(pod.subdomain.text, pod.workload)


def naming_services(manifests: Manifests) -> Iterable[Node]:
    found = {}
    for pod in multi_node_pods(manifests):
        service = _naming_service(pod)
        if service is not None:
            found[id(service)] = service
    return found.values()


def _rendezvous_services(manifests: Manifests) -> Iterable[tuple[Manifests, Node]]:
    """Services of training: headless, on a port of torch, or named by a pod. Others may select pods in other files."""
    if not manifests.training:
        return
    used = set()
    for pod in manifests.training:
        used.add(pod.subdomain.text)
        for host, _, _ in pod.endpoints:
            used.add(host.partition(".")[0])
    for service in manifests.of_kind("Service"):
        spec = service.get("spec")
        ports = {port.get("port").number for port in spec.get("ports")}
        is_rendezvous = spec.get("clusterIP").text == "None" or bool(ports & set(RENDEZVOUS_PORTS))
        if is_rendezvous or service.get("metadata", "name").text in used:
            yield manifests, service


@rule(
    "service-selects-nothing",
    "error",
    "Service whose selector matches no pod",
    why="The name does not resolve, and every process waits for the master until it times out.",
    remedy="Select a label of the pod template, or one that Kubernetes sets: batch.kubernetes.io/job-name: <job>.",
    over=_rendezvous_services,
)
def service_selects_nothing(found: tuple[Manifests, Node]) -> Iterator[Match]:
    manifests, service = found
    selector = service.get("spec", "selector")
    if selector.exists and not manifests.selected(service):
        name = shorten(service.get("metadata", "name").text)
        labels = ", ".join(f"{key}: {value.text}" for key, value in selector.items())
        yield Match(selector, f"Service {name} selects {shorten(labels)}, which matches no pod template in the files")


@rule(
    "service-not-headless",
    "error",
    "Service for pod names is not headless",
    why="Only a headless Service gives each pod a DNS name; with a cluster IP <job>-0.<service> does not resolve.",
    remedy="Add clusterIP: None to the Service.",
    over=naming_services,
)
def service_not_headless(service: Node) -> Iterator[Match]:
    address = service.get("spec", "clusterIP")
    if address.text != "None":
        name = service.get("metadata", "name").text
        yield Match(address, f"Service {name} has clusterIP {shorten(address.text) or 'unset'}")


@rule(
    "service-hides-unready-pods",
    "warning",
    "headless Service without publishNotReadyAddresses",
    why="Pods must find each other before they are ready; with a readiness probe they wait for each other forever.",
    remedy="Add publishNotReadyAddresses: true to the Service.",
    over=naming_services,
)
def service_hides_unready_pods(service: Node) -> Iterator[Match]:
    field = service.get("spec", "publishNotReadyAddresses")
    if field.value is not True:
        yield Match(field, f"Service {service.get('metadata', 'name').text} has no publishNotReadyAddresses: true")


@rule(
    "pods-without-names",
    "error",
    "pods without a subdomain (Job) or serviceName (StatefulSet)",
    why="The pods have no DNS names, and <job>-0.<service> does not resolve.",
    remedy="Set subdomain in the pod template (StatefulSet: serviceName) to the name of a headless Service.",
    over=multi_node_pods,
)
def pods_without_names(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in NEED_SERVICE or pod.subdomain.text:
        return
    hosts = [host for host, _, _ in pod.endpoints]
    pod_name = re.compile(rf"{re.escape(pod.workload.name)}-\d+(?:\.|$)")
    # An address elsewhere needs no names here: the master may be in another file.
    if not hosts or any(pod_name.match(host) for host in hosts):
        field = "subdomain"
        if pod.workload.kind == "StatefulSet":
            field = "serviceName"
        yield Match(pod.subdomain, f"{pod.workload.kind} {pod.workload.name} has no {field}")


@rule(
    "subdomain-without-service",
    "warning",
    "subdomain or serviceName without a Service of that name",
    why="The Service provides the DNS names of the pods; without it they do not resolve.",
    remedy="Add a headless Service of that name, or lint its file together with this one.",
    over=multi_node_pods,
)
def subdomain_without_service(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind in NEED_SERVICE and pod.subdomain.text and _naming_service(pod) is None:
        yield Match(pod.subdomain, f"Service {shorten(pod.subdomain.text)} is not in the files")


def _pods_of_complete_files(manifests: Manifests) -> Iterable[Pod]:
    if not _seem_complete(manifests):
        return ()
    return multi_node_pods(manifests)


def _seem_complete(manifests: Manifests) -> bool:
    """Whether the files seem to be all that is applied: more than workloads, and nothing that renames objects or may
    create Services."""
    for node in manifests.objects:
        group = node.get("apiVersion").text.rpartition("/")[0]
        is_builtin = "." not in group or group.endswith(".k8s.io")
        if not is_builtin and group not in KNOWN_GROUPS:
            return False
    kinds = {node.get("kind").text for node in manifests.objects}
    return "Kustomization" not in kinds and not kinds <= set(KINDS)


@rule(
    "endpoint-without-service",
    "warning",
    "rendezvous endpoint or MASTER_ADDR at a Service that is not in the files",
    why="Without the Service the name does not resolve, and every process waits for the master until it times out.",
    remedy="Add the Service, or correct the name: <job>-0.<service>.",
    over=_pods_of_complete_files,
)
def endpoint_without_service(pod: Pod) -> Iterator[Match]:
    if pod.spec.get("hostNetwork").value is True:
        return
    for host, line, node in pod.endpoints:
        name = _service_of(pod, host)
        is_reported = name == pod.subdomain.text  # by subdomain-without-service
        if name and not is_reported and pod.workload.manifests.service(name, pod.workload) is None:
            yield Match(node, f"endpoint {shorten(host)}: Service {shorten(name)} is not in the files", line)


def _service_of(pod: Pod, host: str) -> str:
    """The Service that a name in the namespace of the pod needs; empty if there is none or the name is ambiguous."""
    if not _CLUSTER_NAME.fullmatch(host) or host == "localhost":
        return ""
    first, *rest = re.sub(r"\.svc(?:\.cluster\.local)?$", "", host).split(".")
    kinds = set()
    for workload in pod.workload.manifests.workloads:
        if first.startswith(f"{workload.name}-"):  # the name may be that of one of its pods
            kinds.add(workload.kind)
    if kinds.intersection(OPERATOR_KINDS):
        return ""  # the operator creates a Service per pod
    if rest and kinds.intersection(NEED_SERVICE):
        return rest[0]
    if rest and "JobSet" in kinds:
        return ""  # its controller creates the Service
    if not rest or rest == [pod.workload.namespace]:
        return first
    return ""


@rule(
    "name-too-long",
    "error",
    "pod names exceed 63 characters",
    why="The host name of a pod is the name of the job and the pod's index, at most 63 characters.",
    remedy="Use a shorter name for the job.",
    over=training_pods,
)
def name_too_long(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in MIDDLES:
        return
    middle = MIDDLES[pod.workload.kind].format(role=pod.role.lower())
    longest = f"{pod.workload.name}{middle}-{max((pod.workload.nodes or 1) - 1, 0)}"
    if len(longest) > NAME_LIMIT:
        yield Match(pod.workload.node.get("metadata", "name"), f"pod name {longest} has {len(longest)} characters")


MIDDLES = {"Job": "", "StatefulSet": "", "PyTorchJob": "-{role}", "JobSet": "-{role}-0", "TrainJob": "-node-0"}
"""Part of a pod name between the name of the job and the index."""
RULES = (
    service_selects_nothing,
    service_not_headless,
    service_hides_unready_pods,
    pods_without_names,
    subdomain_without_service,
    endpoint_without_service,
    name_too_long,
)
