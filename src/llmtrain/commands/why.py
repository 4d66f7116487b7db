"""llmtrain why: the one cause for which a run of the cluster does not do what it should."""

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.commands.options import JsonOption, show

NOT_TOLD = 1


def command(
    run: RunArgument,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Why a run does not do what it should: one cause, what shows it, and what to do. Of a run that is well it says
    so. Exit code 0 if it could be told, else 1."""
    from llmtrain.launch.record import find_record
    from llmtrain.operate.why.explain import explain

    cluster = connect(kubeconfig, context)
    why = explain(cluster, find_record(cluster, run, namespace or cluster.namespace))
    show(json_, why.as_dict(), why.text)
    if why.cause == "unknown":
        raise typer.Exit(NOT_TOLD)
