"""Pod Security `restricted` and other hardening. All of it is advice: training works without."""

from collections.abc import Callable, Iterator

from llmtrain.lint.container_command import Container
from llmtrain.lint.manifests import Pod
from llmtrain.lint.rules.rule import Match, Rule, complete_pods, rule, shorten
from llmtrain.lint.yaml_nodes import Node

SAFE_PROFILES = ("RuntimeDefault", "Localhost")
AMOUNTS = ("cpu", "memory")


def _containers(
    id_: str, what: str, why: str, fix: str, find: Callable[[Pod, Container], tuple[Node, str] | None]
) -> Rule:
    """A rule that checks each container of a pod."""

    def check(pod: Pod) -> Iterator[Match]:
        for container in pod.all_containers:
            if (found := find(pod, container)) is not None:
                yield Match(found[0], f"container {shorten(container.name)}: {found[1]}")

    return rule(id_, "advice", what, why=why, fix=fix, over=complete_pods)(check)


def _security(pod: Pod, container: Container, field: str) -> Node:
    """The field of the container, else that of the pod."""
    of_container = container.node.get("securityContext", field)
    of_pod = pod.spec.get("securityContext", field)
    return of_container if of_container.exists or not of_pod.exists else of_pod


def _root(pod: Pod, container: Container) -> tuple[Node, str] | None:
    user, non_root = _security(pod, container, "runAsUser"), _security(pod, container, "runAsNonRoot")
    if user.number == 0:
        return user, "runAsUser is 0 (root)"
    return None if non_root.value is True else (non_root, "runAsNonRoot is not true")


def _seccomp(pod: Pod, container: Container) -> tuple[Node, str] | None:
    profile = _security(pod, container, "seccompProfile")
    return None if profile.get("type").text in SAFE_PROFILES else (profile, "seccompProfile is not RuntimeDefault")


def _escalation(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "allowPrivilegeEscalation")
    return None if field.value is False else (field, "allowPrivilegeEscalation is not false")


def _capabilities(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "capabilities", "drop")
    return None if any(one.text == "ALL" for one in field) else (field, "capabilities.drop does not contain ALL")


def _writable(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "readOnlyRootFilesystem")
    return None if field.value is True else (field, "readOnlyRootFilesystem is not true")


def _resources(_: Pod, container: Container) -> tuple[Node, str] | None:
    """Only limits are checked: a missing request defaults to the limit."""
    resources = container.node.get("resources")
    limits = {name for name, _ in resources.get("limits").items()}
    missing = [name for name in AMOUNTS if name not in limits]
    return (resources, f"no limit for {', '.join(missing)}") if missing else None


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
    fix="Set automountServiceAccountToken: false in the pod template.",
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
    fix="Set enableServiceLinks: false in the pod template.",
    over=complete_pods,
)
def service_links(pod: Pod) -> Iterator[Match]:
    field = pod.spec.get("enableServiceLinks")
    if field.value is not False:
        yield Match(field, "enableServiceLinks is not false")


RULES = (
    run_as_root,
    no_seccomp,
    privilege_escalation,
    capabilities,
    writable_root,
    service_account_token,
    service_links,
    no_resources,
)
