"""Options shared by commands that talk to a cluster, and the connection to it."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster

KubeconfigOption = Annotated[
    str | None,
    typer.Option("--kubeconfig", help="Kubeconfig file. Default: $KUBECONFIG, ~/.kube/config.", show_default=False),
]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", help="Kubeconfig context. Default: the current context.", show_default=False),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace. Default: the namespace of the context.", show_default=False),
]
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


def connect(kubeconfig: str | None, context: str | None) -> "Cluster":
    """Connect to the cluster the options select. The Kubernetes client is imported here, not at startup."""
    from llmtrain.kubernetes.client import Cluster

    return Cluster.connect(kubeconfig, context)
