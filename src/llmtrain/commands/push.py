"""llmtrain push: copy files into the pods of a run launched with --hold."""

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
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Files and directories.", show_default=False)],
    pod: PodOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Copy files and directories to /work in every pod of a run launched with --hold, or in the pods given by --pod.
    Inside directories .git, .venv, .env, private keys, caches and symbolic links are skipped."""
    from llmtrain.launch.record import find_record
    from llmtrain.launch.work import WORK_DIR
    from llmtrain.operate.exec.run_in_pods import bundle_files, push
    from llmtrain.text import plural

    cluster = connect(kubeconfig, context, run)
    bundle = bundle_files(files)
    pods = push(cluster, find_record(cluster, run, namespace or cluster.namespace), bundle, pod or ())
    if bundle.skipped:
        more = ", ..." if len(bundle.skipped) > 5 else ""
        say(f"warning: skipped {', '.join(bundle.skipped[:5])}{more}", sys.stderr)
    value = {"run_id": run, "files": bundle.names, "left_out": bundle.skipped, "pods": [each.name for each in pods]}
    files_text = f"{plural(len(bundle.names), 'file')} ({bundle.size:,} bytes)"
    show(json_, value, f"Copied {files_text} to {WORK_DIR} in {plural(len(pods), 'pod')}.")
