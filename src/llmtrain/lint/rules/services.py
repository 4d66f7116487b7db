"""DNS names of pods: headless Service, subdomain, length of names."""

import re
from collections.abc import Iterable, Iterator

from llmtrain.lint.manifests import KINDS, OPERATOR_KINDS, Manifests, Pod
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
    found = [_naming_service(pod) for pod in manifests.training() if pod.is_multi_node]
    return {id(service): service for service in found if service is not None}.values()


def _rendezvous_services(manifests: Manifests) -> Iterable[tuple[Manifests, Node]]:
    """Services of training: headless, on a port of torch, or named by a pod. Others may select pods in other files."""
    training = list(manifests.training())
    if not training:
        return
    used = {pod.subdomain.text for pod in training}
    used |= {host.partition(".")[0] for pod in training for host, _, _ in pod.endpoints}
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
    fix="Select a label of the pod template, or one that Kubernetes sets: batch.kubernetes.io/job-name: <job>.",
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
    fix="Add clusterIP: None to the Service.",
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
    fix="Add publishNotReadyAddresses: true to the Service.",
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
    fix="Set subdomain in the pod template (StatefulSet: serviceName) to the name of a headless Service.",
    over=multi_node_pods,
)
def pods_without_names(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind not in NEED_SERVICE or pod.subdomain.text:
        return
    hosts = [host for host, _, _ in pod.endpoints]
    own = re.compile(rf"{re.escape(pod.workload.name)}-\d+(?:\.|$)")
    if not hosts or any(own.match(host) for host in hosts):
        field = "serviceName" if pod.workload.kind == "StatefulSet" else "subdomain"
        yield Match(pod.subdomain, f"{pod.workload.kind} {pod.workload.name} has no {field}")


@rule(
    "subdomain-without-service",
    "warning",
    "subdomain or serviceName without a Service of that name",
    why="The Service provides the DNS names of the pods; without it they do not resolve.",
    fix="Add a headless Service of that name, or lint its file together with this one.",
    over=multi_node_pods,
)
def subdomain_without_service(pod: Pod) -> Iterator[Match]:
    if pod.workload.kind in NEED_SERVICE and pod.subdomain.text and _naming_service(pod) is None:
        yield Match(pod.subdomain, f"Service {shorten(pod.subdomain.text)} is not in the files")


@rule(
    "endpoint-without-service",
    "warning",
    "rendezvous endpoint or MASTER_ADDR at a Service that is not in the files",
    why="Without the Service the name does not resolve, and every process waits for the master until it times out.",
    fix="Add the Service, or correct the name: <job>-0.<service>.",
    over=lambda manifests: multi_node_pods(manifests) if _seem_complete(manifests) else (),
)
def endpoint_without_service(pod: Pod) -> Iterator[Match]:
    if pod.spec.get("hostNetwork").value is True:
        return
    for host, line, node in pod.endpoints:
        name = _service_of(pod, host)
        is_reported = name == pod.subdomain.text  # by subdomain-without-service
        if name and not is_reported and pod.workload.manifests.service(name, pod.workload) is None:
            yield Match(node, f"endpoint {shorten(host)}: Service {shorten(name)} is not in the files", line)


def _seem_complete(manifests: Manifests) -> bool:
    """Whether the files seem to be all that is applied: more than workloads, and nothing that renames objects or may
    create Services."""
    kinds = {node.get("kind").text for node in manifests.objects}
    groups = {node.get("apiVersion").text.rpartition("/")[0] for node in manifests.objects} - KNOWN_GROUPS
    is_known = all("." not in group or group.endswith(".k8s.io") for group in groups)
    return is_known and "Kustomization" not in kinds and not kinds <= set(KINDS)


def _service_of(pod: Pod, host: str) -> str:
    """The Service that a name in the namespace of the pod needs; empty if there is none or the name is ambiguous."""
    if not _CLUSTER_NAME.fullmatch(host) or host == "localhost":
        return ""
    first, *rest = re.sub(r"\.svc(?:\.cluster\.local)?$", "", host).split(".")
    workloads = [one for one in pod.workload.manifests.workloads if first.startswith(f"{one.name}-")]
    if any(one.kind in OPERATOR_KINDS for one in workloads):
        return ""  # the operator creates a Service per pod
    if rest and any(one.kind in (*NEED_SERVICE, "JobSet") for one in workloads):
        return rest[0] if any(one.kind in NEED_SERVICE for one in workloads) else ""
    return first if not rest or rest == [pod.workload.namespace] else ""


@rule(
    "name-too-long",
    "error",
    "pod names exceed 63 characters",
    why="The host name of a pod is the name of the job and the pod's index, at most 63 characters.",
    fix="Use a shorter name for the job.",
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
