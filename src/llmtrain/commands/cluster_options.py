"""Options shared by commands that talk to a cluster, and the connection to it."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.core.arguments import ClusterPlace
from llmtrain.errors import UsageError

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.operate.cluster_run import ClusterRun

KubeconfigOption = Annotated[
    str | None,
    typer.Option("--kubeconfig", help="Kubeconfig file. Default: $KUBECONFIG, ~/.kube/config.", show_default=False),
]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", help="Kubeconfig context. Default: the current context.", show_default=False),
]


def _check_namespace(namespace: str | None) -> str | None:
    from llmtrain.config.kubernetes_types import NAMESPACE_PATTERN

    if namespace is None or re.fullmatch(NAMESPACE_PATTERN, namespace):
        return namespace
    raise UsageError(
        f"--namespace '{namespace}': use lowercase letters, digits and hyphens.",
        remedy=suggestion(namespace, NAMESPACE_PATTERN),
    )


def suggestion(name: str, pattern: str) -> str | None:
    """A similar name that matches the pattern, as a remedy."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    similar = [each[:40].strip("-") for each in (plain, f"run-{plain}")]
    return next((f"Try '{each}'." for each in similar if plain and re.fullmatch(pattern, each)), None)


NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        "-n",
        help="Namespace. Default: the namespace of the context.",
        show_default=False,
        callback=_check_namespace,
    ),
]


def check_image(image: str | None) -> None:
    """Refuse an --image that no node could pull."""
    from llmtrain.config.kubernetes_syntax import image_problem

    if image and (problem := image_problem(image)):
        raise UsageError(f"--image {problem}")


AllNamespacesOption = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Show runs of all namespaces.")]
RecoverOption = Annotated[
    float | None,
    typer.Option(
        "--recover-lost-nodes",
        metavar="SECONDS",
        min=0,
        help="While watching, replace pods whose node has been NotReady for this long, as `recover` does.",
        show_default=False,
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id.", show_default=False)]

PodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pod",
        metavar="INDEX",
        help="Only this pod: its index (node rank) or name. Repeatable.",
        show_default=False,
    ),
]


def connect(kubeconfig: str | None, context: str | None, run: str | None = None) -> "Cluster":
    """Connect to the cluster the options select. The Kubernetes client is imported here, not at startup. `run`: the run
    that the command is about, which may be a local one."""
    from llmtrain.kubernetes.client import Cluster
    from llmtrain.kubernetes.kubeconfig import has_kubeconfig
    from llmtrain.runs.directory import local_run_hint

    try:
        return Cluster.connect(kubeconfig, context)
    except UsageError as problem:
        if run and not has_kubeconfig(kubeconfig):
            problem.remedy = local_run_hint(run) or problem.remedy
        raise


def connect_to_namespace(place: ClusterPlace, run: str | None = None) -> "tuple[Cluster, str]":
    """(Cluster, namespace) that the options select."""
    cluster = connect(place.kubeconfig, place.context, run)
    return cluster, place.namespace or cluster.namespace


def find_run(run: str, place: ClusterPlace) -> "ClusterRun":
    """The handle on a run of the cluster that the options select."""
    from llmtrain.operate.cluster_run import ClusterRun

    return ClusterRun.find(connect(place.kubeconfig, place.context, run), run, place.namespace)
