"""llmtrain why: diagnose a run."""

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, RunArgument, connect
from llmtrain.commands.options import JsonOption, show

NO_CAUSE_FOUND = 1


def command(
    run: RunArgument,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Diagnose a run: cause, evidence and remedy. Exits 1 if no cause was found."""
    from llmtrain.launch.record import find_record
    from llmtrain.operate.why.explain import explain

    cluster = connect(kubeconfig, context, run)
    why = explain(cluster, find_record(cluster, run, namespace or cluster.namespace))
    show(json_, why.as_dict(), why.text)
    if why.cause == "unknown":
        raise typer.Exit(NO_CAUSE_FOUND)
