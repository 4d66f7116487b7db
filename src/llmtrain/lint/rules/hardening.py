"""What Pod Security `restricted` asks for, and a little more. All of it is advice: training works without."""

from collections.abc import Callable, Iterator

from llmtrain.lint.command import Container
from llmtrain.lint.model import Pod
from llmtrain.lint.rules.rule import Rule, Seen, rule, shown, whole_pods
from llmtrain.lint.yaml_nodes import Node

SAFE_PROFILES = ("RuntimeDefault", "Localhost")
AMOUNTS = ("cpu", "memory")


def _containers(
    id_: str, what: str, why: str, fix: str, find: Callable[[Pod, Container], tuple[Node, str] | None]
) -> Rule:
    """A rule about each container of a pod."""

    def look(pod: Pod) -> Iterator[Seen]:
        for container in pod.all_containers:
            if (found := find(pod, container)) is not None:
                yield Seen(found[0], f"container {shown(container.name)}: {found[1]}")

    return rule(id_, "advice", what, why=why, fix=fix, over=whole_pods)(look)


def _security(pod: Pod, container: Container, field: str) -> Node:
    """Of the container, else of the pod."""
    own = container.node.get("securityContext", field)
    whole = pod.spec.get("securityContext", field)
    return own if own.exists or not whole.exists else whole


def _root(pod: Pod, container: Container) -> tuple[Node, str] | None:
    user, non_root = _security(pod, container, "runAsUser"), _security(pod, container, "runAsNonRoot")
    if user.number == 0:
        return user, "runAsUser is 0, which is root"
    return None if non_root.value is True else (non_root, "runAsNonRoot is not true")


def _seccomp(pod: Pod, container: Container) -> tuple[Node, str] | None:
    profile = _security(pod, container, "seccompProfile")
    return None if profile.get("type").text in SAFE_PROFILES else (profile, "no seccompProfile")


def _escalation(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "allowPrivilegeEscalation")
    return None if field.value is False else (field, "allowPrivilegeEscalation is not false")


def _capabilities(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "capabilities", "drop")
    return None if any(one.text == "ALL" for one in field) else (field, "capabilities are not dropped")


def _writable(_: Pod, container: Container) -> tuple[Node, str] | None:
    field = container.node.get("securityContext", "readOnlyRootFilesystem")
    return None if field.value is True else (field, "readOnlyRootFilesystem is not true")


def _resources(_: Pod, container: Container) -> tuple[Node, str] | None:
    """Where only the limit is written, the request is the same."""
    resources = container.node.get("resources")
    limits = {name for name, _ in resources.get("limits").items()}
    asked = {name for name, _ in resources.get("requests").items()}
    gpus = sorted(name for name in asked - limits if "gpu" in name)
    missing = [*(name for name in AMOUNTS if name not in limits), *gpus]
    return (resources, f"no limit for {', '.join(missing)}") if missing else None


run_as_root = _containers(
    "may-run-as-root",
    "a container that may run as root",
    "Root in a container is root on the node once it breaks out; `restricted` namespaces refuse the pod.",
    "Set runAsNonRoot: true with runAsUser, runAsGroup and fsGroup in the pod's securityContext.",
    _root,
)
no_seccomp = _containers(
    "no-seccomp",
    "no seccomp profile",
    "All system calls of the kernel are open to it; `restricted` namespaces refuse the pod.",
    "Set seccompProfile: {type: RuntimeDefault} in the pod's securityContext.",
    _seccomp,
)
privilege_escalation = _containers(
    "privilege-escalation",
    "privileges may be gained",
    "A setuid program in the image makes a user root; `restricted` namespaces refuse the pod.",
    "Set allowPrivilegeEscalation: false in the container's securityContext.",
    _escalation,
)
capabilities = _containers(
    "capabilities-kept",
    "capabilities are not dropped",
    "Training needs none of them; `restricted` namespaces refuse the pod.",
    "Set capabilities: {drop: [ALL]} in the container's securityContext.",
    _capabilities,
)
writable_root = _containers(
    "writable-root",
    "a writable root filesystem",
    "What is written there is lost unseen, and counts against the node's disk until the pod is evicted.",
    "Set readOnlyRootFilesystem: true, with an emptyDir for /tmp and for caches.",
    _writable,
)
no_resources = _containers(
    "no-resources",
    "no limits for cpu, memory or GPUs",
    "A pod without them is evicted first, and can take the memory of its neighbours.",
    "Set requests and limits for cpu, memory and GPUs, best to the same amounts.",
    _resources,
)


@rule(
    "service-account-token",
    "advice",
    "a token of the service account in the pod",
    why="Training does not talk to the API; whoever breaks into the pod then does.",
    fix="Set automountServiceAccountToken: false in the pod template.",
    over=whole_pods,
)
def service_account_token(pod: Pod) -> Iterator[Seen]:
    field = pod.spec.get("automountServiceAccountToken")
    if field.value is not False:
        yield Seen(field, "automountServiceAccountToken is not false")


@rule(
    "service-links",
    "advice",
    "variables for every Service of the namespace",
    why="Each Service adds seven variables: thousands keep a pod from starting; one called `master` sets MASTER_PORT.",
    fix="Set enableServiceLinks: false in the pod template.",
    over=whole_pods,
)
def service_links(pod: Pod) -> Iterator[Seen]:
    field = pod.spec.get("enableServiceLinks")
    if field.value is not False:
        yield Seen(field, "enableServiceLinks is not false")


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
