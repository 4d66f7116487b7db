"""Pod Security `restricted` and other hardening. It is advice, because training works without, except where the files
say that the pods are to be admitted to a namespace that enforces `restricted`."""

from collections.abc import Callable, Iterator

from llmtrain.lint.container_command import Container
from llmtrain.lint.manifests import Pod
from llmtrain.lint.rules.rule import Match, Rule, complete_pods, rule, shorten
from llmtrain.lint.yaml_nodes import Node

SAFE_PROFILES = ("RuntimeDefault", "Localhost")
AMOUNTS = ("cpu", "memory")
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
ADDABLE_CAPABILITY = "NET_BIND_SERVICE"
"""The only capability that `restricted` allows to add."""


def _containers(
    id_: str, what: str, why: str, remedy: str, find: Callable[[Pod, Container], tuple[Node, str] | None]
) -> Rule:
    """A rule that checks each container of a pod."""

    def check(pod: Pod) -> Iterator[Match]:
        for container in pod.all_containers:
            found = find(pod, container)
            if found is not None:
                node, problem = found
                yield Match(node, f"container {shorten(container.name)}: {problem}")

    return rule(id_, "advice", what, why=why, remedy=remedy, over=complete_pods)(check)


def _security(pod: Pod, container: Container, field: str) -> Node:
    """The field of the container, else that of the pod."""
    of_container = container.node.get("securityContext", field)
    of_pod = pod.spec.get("securityContext", field)
    if of_pod.exists and not of_container.exists:
        return of_pod
    return of_container  # also where neither is set: the finding names the line of the container


def _root(pod: Pod, container: Container) -> tuple[Node, str] | None:
    user = _security(pod, container, "runAsUser")
    if user.number == 0:
        return user, "runAsUser is 0 (root)"
    non_root = _security(pod, container, "runAsNonRoot")
    if non_root.value is not True:
        return non_root, "runAsNonRoot is not true"
    return None


def _seccomp(pod: Pod, container: Container) -> tuple[Node, str] | None:
    profile = _security(pod, container, "seccompProfile")
    if profile.get("type").text in SAFE_PROFILES:
        return None
    return profile, "seccompProfile is not RuntimeDefault"


def _escalation(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "allowPrivilegeEscalation")
    if field.value is False:
        return None
    return field, "allowPrivilegeEscalation is not false"


def _capabilities(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "capabilities", "drop")
    if "ALL" in [capability.text for capability in field]:
        return None
    return field, "capabilities.drop does not contain ALL"


def _writable(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "readOnlyRootFilesystem")
    if field.value is True:
        return None
    return field, "readOnlyRootFilesystem is not true"


def _resources(_: Pod, container: Container) -> tuple[Node, str] | None:
    """Only limits are checked: a missing request defaults to the limit."""
    resources = container.node.get("resources")
    limits = dict(resources.get("limits").items())
    missing = [name for name in AMOUNTS if name not in limits]
    if not missing:
        return None
    return resources, f"no limit for {', '.join(missing)}"


run_as_root = _containers(
    "may-run-as-root",
    "container may run as root",
    "Root in a container is root on the node after a breakout; `restricted` namespaces reject the pod.",
    "Set runAsNonRoot: true with runAsUser, runAsGroup and fsGroup in the pod's securityContext.",
    _root,
)
no_seccomp = _containers(
    "no-seccomp",
    "no seccomp profile",
    "All system calls are allowed; `restricted` namespaces reject the pod.",
    "Set seccompProfile: {type: RuntimeDefault} in the pod's securityContext.",
    _seccomp,
)
privilege_escalation = _containers(
    "privilege-escalation",
    "privilege escalation is allowed",
    "A setuid program in the image makes a user root; `restricted` namespaces reject the pod.",
    "Set allowPrivilegeEscalation: false in the container's securityContext.",
    _escalation,
)
capabilities = _containers(
    "capabilities-kept",
    "capabilities are not dropped",
    "Training needs none of them; `restricted` namespaces reject the pod.",
    "Set capabilities: {drop: [ALL]} in the container's securityContext.",
    _capabilities,
)
writable_root = _containers(
    "writable-root",
    "writable root filesystem",
    "Files written there are lost with the pod, and count against the node's disk until the pod is evicted.",
    "Set readOnlyRootFilesystem: true, with an emptyDir for /tmp and for caches.",
    _writable,
)
no_resources = _containers(
    "no-resources",
    "no limits for cpu or memory",
    "A pod without limits is evicted first, and can use the memory of other pods.",
    "Set requests and limits for cpu and memory, preferably to the same amounts.",
    _resources,
)


@rule(
    "service-account-token",
    "advice",
    "service account token is mounted in the pod",
    why="Training does not use the Kubernetes API; an attacker in the pod could.",
    remedy="Set automountServiceAccountToken: false in the pod template.",
    over=complete_pods,
)
def service_account_token(pod: Pod) -> Iterator[Match]:
    field = pod.spec.get("automountServiceAccountToken")
    if field.value is not False:
        yield Match(field, "automountServiceAccountToken is not false")


@rule(
    "service-links",
    "advice",
    "environment variables for every Service of the namespace",
    why="Each Service adds seven variables: thousands prevent a pod from starting; a Service named `master` "
    "sets MASTER_PORT.",
    remedy="Set enableServiceLinks: false in the pod template.",
    over=complete_pods,
)
def service_links(pod: Pod) -> Iterator[Match]:
    field = pod.spec.get("enableServiceLinks")
    if field.value is not False:
        yield Match(field, "enableServiceLinks is not false")


@rule(
    "container-not-restricted",
    "error",
    "container that Pod Security `restricted` rejects, in a pod that is made for it",
    why="The namespace rejects the whole pod, so the job waits for pods that are never created.",
    remedy="Give the container its own securityContext: allowPrivilegeEscalation: false and capabilities: {drop: "
    "[ALL]}, and with the pod's or its own runAsNonRoot: true and seccompProfile: {type: RuntimeDefault}.",
    over=complete_pods,
)
def container_not_restricted(pod: Pod) -> Iterator[Match]:
    """In a restricted namespace every container that is rejected; elsewhere only a container without securityContext
    beside others that `restricted` admits, because root may be meant."""
    checked = [(container, _restricted_problems(pod, container)) for container in pod.all_containers]
    is_claimed = not _uses_host(pod) and any(not problems for _, problems in checked)
    for container, problems in checked:
        security = container.node.get("securityContext")
        is_reported = pod.workload.is_in_restricted_namespace or (is_claimed and not security.exists)
        if problems and is_reported:
            yield Match(security, f"container {shorten(container.name)}: {', '.join(problems)}")


def _restricted_problems(pod: Pod, container: Container) -> list[str]:
    """Why `restricted` rejects a container."""
    problems = []
    for check in (_root, _seccomp, _escalation, _capabilities):
        found = check(pod, container)
        if found is not None:
            problems.append(found[1])
    for capability in container.node.get("securityContext", "capabilities", "add"):
        if capability.text != ADDABLE_CAPABILITY:
            problems.append(f"capability {shorten(capability.text)} is added")
    return problems


def _uses_host(pod: Pod) -> bool:
    """Whether `restricted` rejects the pod in any case."""
    if any(pod.spec.get(field).value is True for field in HOST_FIELDS):
        return True
    return any(volume.get("hostPath").exists for volume in pod.spec.get("volumes"))


RULES = (
    run_as_root,
    no_seccomp,
    privilege_escalation,
    capabilities,
    writable_root,
    service_account_token,
    service_links,
    no_resources,
    container_not_restricted,
)
