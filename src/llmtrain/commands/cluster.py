"""llmtrain cluster: a Kubernetes cluster on one's own machine, made with kind."""

from pathlib import Path
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.errors import UsageError

NameOption = Annotated[str, typer.Option("--name", help="Name of the kind cluster.")]
DEFAULT_NAME = "llmtrain"

app = typer.Typer(help="A cluster on this machine, with Docker and kind.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """A cluster on this machine, with Docker and kind."""


@app.command("up")
def up_command(
    name: NameOption = DEFAULT_NAME,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that run pods; from 2 on, one more manages them.")] = 2,
    runs: Annotated[
        Path | None, typer.Option(help="Folder of this machine for runs. Default: runs.", show_default=False)
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="kind's image of a node. Default: that of its version.", show_default=False)
    ] = None,
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="NAMES",
            help="Install operators too, at the tested versions: training-operator, jobset, trainer; comma-separated.",
            show_default=False,
        ),
    ] = None,
    kubeconfig: KubeconfigOption = None,
    json_: JsonOption = False,
) -> None:
    """Make a cluster, and a claim `runs` on a folder of this machine. One that `up` made before is only completed."""
    from llmtrain.local_cluster.kind_cluster import CLAIM, NAMESPACE, up
    from llmtrain.local_cluster.operators import choose_operators, install_operators

    operators = choose_operators(with_)  # found out before minutes are spent
    done = up(name, nodes, runs, image, kubeconfig)
    cluster = done.cluster
    if operators:
        where = kubeconfig or cluster.kubeconfig
        install_operators(connect(where, cluster.context), operators, cluster.context, where)
    state = "up" if done.is_new else "there already"
    size = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    claim = f"claim {CLAIM} in namespace {NAMESPACE}"
    volume = f"--set launch.runs_volume.claim={CLAIM}"
    volume += f" --kubeconfig {cluster.kubeconfig}" if cluster.kubeconfig else ""
    lines = [
        f"Cluster {name} is {state}: {size}, context {cluster.context}.",
        f"Runs are in {cluster.runs}, by {claim}. Any user of this machine can write there: pods are user 1000.",
        f"Next: llmtrain cluster load-image IMAGE --name {name}",
        f"      llmtrain launch --config k8s_indexed_job --image IMAGE {volume}",
    ]
    if operators:
        lines.insert(2, f"Installed: {', '.join(operators)}.")
    if done.has_new_claim and not done.is_new:
        lines.insert(2, f"The {claim} was missing, and was made again.")
    value = {"cluster": name, "context": cluster.context, "nodes": cluster.nodes, "runs": cluster.runs}
    value |= {"claim": CLAIM, "namespace": NAMESPACE, "made": done.is_new, "claim_made": done.has_new_claim}
    value["operators"] = operators
    show(json_, value, "\n".join(lines))


@app.command("down")
def down_command(name: NameOption = DEFAULT_NAME, json_: JsonOption = False) -> None:
    """Remove a cluster that `up` made. Others are not touched, and the folder with the runs stays."""
    from llmtrain.local_cluster.kind_cluster import down

    gone = down(name)
    runs = gone.runs if gone else None
    text = f"Cluster {name} is removed. Its runs stay in {runs}." if gone else f"There is no kind cluster {name}."
    show(json_, {"cluster": name, "removed": gone is not None, "runs": runs}, text)


@app.command("load-image")
def load_image_command(
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Image of this machine.", show_default=False)],
    name: NameOption = DEFAULT_NAME,
    if_reached: Annotated[
        bool, typer.Option("--if-reached", help="Only if the kubeconfig's context leads to that cluster.")
    ] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Copy an image to all nodes of a kind cluster, so that nothing has to be pulled."""
    from llmtrain.local_cluster.kind_cluster import context_of, load_image

    if not if_reached and (kubeconfig or context):
        raise UsageError(
            "--kubeconfig and --context say where --if-reached looks.", remedy="Add it, or leave them out."
        )
    reached = _reached(kubeconfig, context) if if_reached else context_of(name)
    value = {"image": image, "cluster": name, "loaded": reached == context_of(name)}
    if not value["loaded"]:
        text = f"Image {image} was not loaded into kind cluster {name}: commands reach {reached}, not it."
        show(json_, value, f"{text}\nThe cluster they reach must be able to pull it: push it where it can.")
        return
    load_image(name, image)
    show(json_, value, f"Image {image} is on all nodes of {name}.")


def _reached(kubeconfig: str | None, context: str | None) -> str:
    try:
        return connect(kubeconfig, context).name
    except UsageError as problem:
        return f"no cluster ({problem.what.rstrip('.')})"
