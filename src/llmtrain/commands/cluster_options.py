"""Options of the commands that talk to a cluster, and the way to it."""

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
    typer.Option("--context", help="Context of the kubeconfig. Default: its current one.", show_default=False),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace. Default: that of the context.", show_default=False),
]
AllNamespacesOption = Annotated[bool, typer.Option("--all-namespaces", "-A", help="In every namespace.")]
RecoverOption = Annotated[
    float | None,
    typer.Option(
        "--recover-lost-nodes",
        metavar="SECONDS",
        min=0,
        help="While watching: give up pods whose machine has not answered for so long, as `recover` does.",
        show_default=False,
    ),
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run id: the name of the job.", show_default=False)]

PodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pod",
        metavar="INDEX",
        help="Only this pod: its index (the node rank) or its name. Repeatable.",
        show_default=False,
    ),
]


def connect(kubeconfig: str | None, context: str | None) -> "Cluster":
    """The cluster that the options name; the client is imported only now."""
    from llmtrain.kubernetes.client import Cluster

    return Cluster.connect(kubeconfig, context)
