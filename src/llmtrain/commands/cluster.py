"""llmtrain cluster: a local Kubernetes cluster, created with kind (the tool)."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.core.text import plural
from llmtrain.errors import UsageError

NameOption = Annotated[str, typer.Option("--name", help="Name of the kind cluster.")]
DEFAULT_NAME = "llmtrain"

HELP = "Create a local cluster with Docker and kind (the tool)."
app = typer.Typer(help=HELP, no_args_is_help=True)


@app.callback(help=HELP)
def group() -> None:
    pass


@app.command("up")
def up_command(
    name: NameOption = DEFAULT_NAME,
    nodes: Annotated[
        int, typer.Option(min=1, help="Number of nodes that run pods; with 2 or more a control plane is added.")
    ] = 2,
    runs: Annotated[
        Path | None, typer.Option(help="Local directory for runs. Default: runs.", show_default=False)
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Node image. Default: the one of the installed kind.", show_default=False)
    ] = None,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="NAMES",
            help="Comma-separated operators to install: training-operator, jobset, trainer.",
            show_default=False,
        ),
    ] = None,
    kubeconfig: KubeconfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Create a local cluster and a PersistentVolumeClaim `runs` backed by a local directory. If the cluster exists,
    only what is missing is created."""
    from llmtrain.local_cluster.kind_cluster import CLAIM, NAMESPACE, up
    from llmtrain.local_cluster.operators import choose_operators, install_operators

    operators = choose_operators(with_)  # before the cluster, which takes minutes
    result = up(name, nodes, runs, image, kubeconfig)
    cluster = result.cluster
    if operators:
        kubeconfig = kubeconfig or cluster.kubeconfig
        install_operators(connect(kubeconfig, cluster.context), operators, cluster.context, kubeconfig)
    state = "was created" if result.is_new else "already exists"
    claim = f"claim {CLAIM} in namespace {NAMESPACE}"
    options = f"--set launch.runs_volume.claim={CLAIM}"
    if cluster.kubeconfig:
        options += f" --kubeconfig {cluster.kubeconfig}"
    lines = [
        f"Cluster {name} {state}: {plural(cluster.nodes, 'node')}, context {cluster.context}.",
        f"Runs are stored in {cluster.runs} ({claim}). Every local user can write there: pods run as user 1000.",
        f"Next: llmtrain cluster load-image IMAGE --name {name}",
        f"      llmtrain launch --config k8s_indexed_job --image IMAGE {options}",
    ]
    if operators:
        lines.insert(2, f"Installed: {', '.join(operators)}.")
    if result.has_new_claim and not result.is_new:
        lines.insert(2, f"The {claim} was missing and has been recreated.")
    value = {
        "cluster": name,
        "context": cluster.context,
        "nodes": cluster.nodes,
        "runs": cluster.runs,
        "claim": CLAIM,
        "namespace": NAMESPACE,
        "made": result.is_new,
        "claim_made": result.has_new_claim,
        "operators": operators,
    }
    show(json_, value, "\n".join(lines))


@app.command("down")
def down_command(name: NameOption = DEFAULT_NAME, json_: JsonOption = False) -> None:
    """Delete a cluster created by `up`. Other clusters are refused; the directory with the runs is kept."""
    from llmtrain.local_cluster.kind_cluster import down

    deleted = down(name)
    if deleted is None:
        show(json_, {"cluster": name, "removed": False, "runs": None}, f"There is no kind cluster {name}.")
        return
    text = f"Cluster {name} deleted. Its runs are kept in {deleted.runs}."
    show(json_, {"cluster": name, "removed": True, "runs": deleted.runs}, text)


@app.command("load-image")
def load_image_command(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Local image.", show_default=False)],
    name: NameOption = DEFAULT_NAME,
    if_reached: Annotated[
        bool, typer.Option("--if-reached", help="Do nothing if the kubeconfig context selects another cluster.")
    ] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Copy a local image to all nodes of a kind cluster, so that it need not be pulled."""
    from llmtrain.local_cluster.kind_cluster import context_of, load_image

    if not if_reached and (kubeconfig or context):
        raise UsageError("--kubeconfig and --context require --if-reached.", remedy="Add --if-reached, or omit them.")
    selected = _selected_context(kubeconfig, context) if if_reached else context_of(name)
    value = {"image": image, "cluster": name, "loaded": selected == context_of(name)}
    if not value["loaded"]:
        text = f"Image {image} was not loaded into kind cluster {name}: the kubeconfig selects {selected}."
        show(json_, value, f"{text}\nPush the image to a registry that the selected cluster can pull from.")
        return
    load_image(name, image)
    show(json_, value, f"Loaded image {image} into all nodes of {name}.")


def _selected_context(kubeconfig: str | None, context: str | None) -> str:
    try:
        return connect(kubeconfig, context).name
    except UsageError as problem:
        return f"no cluster ({problem.what.rstrip('.')})"
