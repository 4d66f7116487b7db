"""The names of pods: the headless Service, the subdomain, and what fits into a name."""

import re
from collections.abc import Iterable, Iterator

from llmtrain.lint.model import Manifests, Pod
from llmtrain.lint.rules.rule import Seen, joined_pods, rule, shown, training_pods
from llmtrain.lint.yaml_nodes import Node

NAME_LIMIT = 63
RENDEZVOUS_PORTS = (29500, 29400, 23456)
OWN_NAMES = ("Job", "StatefulSet")
"""Kinds whose pods get their names from a Service of yours; operators make their own."""


def _named(pod: Pod) -> Node | None:
    """The Service in the files that gives a pod its name."""
    if pod.workload.kind not in OWN_NAMES or not pod.subdomain.text:
        return None
    return pod.workload.manifests.service(pod.subdomain.text, pod.workload)


def naming_services(manifests: Manifests) -> Iterable[Node]:
    found = [_named(pod) for pod in manifests.training() if pod.is_many]
    return {id(service): service for service in found if service is not None}.values()


def _meeting_services(manifests: Manifests) -> Iterable[tuple[Manifests, Node]]:
    """Services of training: headless, or on a port of torch, or named by a pod. Others may select what is elsewhere."""
    training = list(manifests.training())
    if not training:
        return
    used = {pod.subdomain.text for pod in training}
    used |= {host.partition(".")[0] for pod in training for host, _, _ in pod.endpoints}
    for service in manifests.of_kind("Service"):
        spec = service.get("spec")
        ports = {port.get("port").number for port in spec.get("ports")}
        is_meeting = spec.get("clusterIP").text == "None" or bool(ports & set(RENDEZVOUS_PORTS))
        if is_meeting or service.get("metadata", "name").text in used:
            yield manifests, service


@rule(
    "service-selects-nothing",
    "error",
    "a Service whose selector no pod carries",
    why="Without a pod behind it the name does not resolve, and every process waits for the master until it gives up.",
    fix="Select a label of the pod template, or one that the cluster gives: batch.kubernetes.io/job-name: <job>.",
    over=_meeting_services,
)
def service_selects_nothing(found: tuple[Manifests, Node]) -> Iterator[Seen]:
    manifests, service = found
    selector = service.get("spec", "selector")
    if selector.exists and not manifests.selected(service):
        wanted = ", ".join(f"{key}: {value.text}" for key, value in selector.items())
        yield Seen(selector, f"no pod template in the files has {shown(wanted)}")


@rule(
    "service-not-headless",
    "error",
    "the Service of the pods' names is not headless",
    why="Only a headless Service gives each pod a name; behind a cluster IP <job>-0.<service> does not resolve.",
    fix="Add clusterIP: None to the Service.",
    over=naming_services,
)
def service_not_headless(service: Node) -> Iterator[Seen]:
    address = service.get("spec", "clusterIP")
    if address.text != "None":
        name = service.get("metadata", "name").text
        yield Seen(address, f"Service {name} has clusterIP {shown(address.text) or 'unset'}")


@rule(
    "service-hides-unready-pods",
    "warning",
    "the headless Service leaves out pods that are not ready",
    why="Pods have to find each other before they are ready; with a readiness probe they wait for each other for ever.",
    fix="Add publishNotReadyAddresses: true to the Service.",
    over=naming_services,
)
def service_hides_unready_pods(service: Node) -> Iterator[Seen]:
    field = service.get("spec", "publishNotReadyAddresses")
    if field.value is not True:
        yield Seen(field, f"Service {service.get('metadata', 'name').text} has no publishNotReadyAddresses: true")


@rule(
    "pods-without-names",
    "error",
    "pods without a subdomain (Job) or serviceName (StatefulSet)",
    why="Without it the pods have no names in DNS, and <job>-0.<service> does not resolve.",
    fix="Set subdomain in the pod template (StatefulSet: serviceName) to the name of a headless Service.",
    over=joined_pods,
)
def pods_without_names(pod: Pod) -> Iterator[Seen]:
    if pod.workload.kind not in OWN_NAMES or pod.subdomain.text:
        return
    hosts = [host for host, _, _ in pod.endpoints]
    own = re.compile(rf"{re.escape(pod.workload.name)}-\d+(?:\.|$)")
    if not hosts or any(own.match(host) for host in hosts):
        yield Seen(pod.subdomain, f"{pod.workload.kind} {pod.workload.name} gives its pods no names")


@rule(
    "subdomain-without-service",
    "warning",
    "a subdomain or serviceName without a Service of that name",
    why="The names of pods come from the Service; where it is missing they do not resolve.",
    fix="Add a headless Service of that name, or lint the file that has it along with this one.",
    over=joined_pods,
)
def subdomain_without_service(pod: Pod) -> Iterator[Seen]:
    if pod.workload.kind in OWN_NAMES and pod.subdomain.text and _named(pod) is None:
        yield Seen(pod.subdomain, f"no Service {shown(pod.subdomain.text)} in the files given")


@rule(
    "name-too-long",
    "error",
    "a name that leaves no room for the pods' numbers",
    why="The host name of a pod is the job's name and its number, and may have 63 characters.",
    fix="Give the job a shorter name.",
    over=training_pods,
)
def name_too_long(pod: Pod) -> Iterator[Seen]:
    if pod.workload.kind not in MIDDLES:
        return
    middle = MIDDLES[pod.workload.kind].format(role=pod.role.lower())
    longest = f"{pod.workload.name}{middle}-{max((pod.workload.nodes or 1) - 1, 0)}"
    if len(longest) > NAME_LIMIT:
        yield Seen(pod.workload.node.get("metadata", "name"), f"{longest} has {len(longest)} characters")


MIDDLES = {"Job": "", "StatefulSet": "", "PyTorchJob": "-{role}", "JobSet": "-{role}-0", "TrainJob": "-node-0"}
"""What stands between the name and the number."""
RULES = (
    service_selects_nothing,
    service_not_headless,
    service_hides_unready_pods,
    pods_without_names,
    subdomain_without_service,
    name_too_long,
)
