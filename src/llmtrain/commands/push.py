"""llmtrain push: bring files to the pods of a run that are held."""

import sys
from typing import Annotated

import typer

from llmtrain.commands.cluster_options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    PodOption,
    RunArgument,
    connect,
)
from llmtrain.commands.options import JsonOption, show
from llmtrain.terminal import say


def command(
    run: RunArgument,
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files and folders.", show_default=False)],
    pod: PodOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Copy files and folders into the work folder (/work) of every pod of a run launched with --hold, or of those that
    --pod names. Of folders, .git, .venv, .env, keys, caches and symbolic links are left out."""
    from llmtrain.launch.record import find_record
    from llmtrain.launch.work import WORK_DIR
    from llmtrain.operate.exec.run_in_pods import pack, push
    from llmtrain.operate.status.view import count

    cluster = connect(kubeconfig, context)
    parcel = pack(files)
    pods = push(cluster, find_record(cluster, run, namespace or cluster.namespace), parcel, pod or ())
    if parcel.left_out:
        more = ", ..." if len(parcel.left_out) > 5 else ""
        say(f"warning: left out: {', '.join(parcel.left_out[:5])}{more}", sys.stderr)
    value = {"run_id": run, "files": parcel.names, "left_out": parcel.left_out, "pods": [each.name for each in pods]}
    files_text = f"{count(len(parcel.names), 'file')}, {parcel.size:,} bytes"
    show(json_, value, f"{files_text}: now in {WORK_DIR} of {count(len(pods), 'pod')}.")
