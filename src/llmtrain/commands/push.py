"""llmtrain push: copy files into the pods of a run launched with --hold."""

from typing import Annotated

import typer

from llmtrain.commands.cluster_options import PodOption, RunArgument, connect_to_namespace
from llmtrain.commands.options import CURRENT, JsonOption, print_warning, show, with_option_groups
from llmtrain.core.arguments import ClusterPlace


@with_option_groups
def command(
    run: RunArgument,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Files and directories.", show_default=False)],
    pod: PodOption = None,
    place: ClusterPlace = CURRENT,
    json_: JsonOption = False,
) -> None:
    """Copy files and directories to /work in every pod of a run launched with --hold, or in the pods given by --pod.
    Inside directories .git, .venv, .env, private keys, caches and symbolic links are skipped."""
    from llmtrain.core.text import plural
    from llmtrain.launch.pod_task import WORK_DIR
    from llmtrain.operate.cluster_run import ClusterRun
    from llmtrain.operate.exec.run_in_pods import bundle_files, push

    cluster, namespace = connect_to_namespace(place, run)
    bundle = bundle_files(files)  # before any request: a file may be missing
    pods = push(ClusterRun.find(cluster, run, namespace).look(with_usage=False), bundle, pod or ())
    if bundle.skipped:
        more = ", ..." if len(bundle.skipped) > 5 else ""
        print_warning(f"skipped {', '.join(bundle.skipped[:5])}{more}")
    value = {"run_id": run, "files": bundle.names, "left_out": bundle.skipped, "pods": [each.name for each in pods]}
    files_text = f"{plural(len(bundle.names), 'file')} ({bundle.size:,} bytes)"
    show(json_, value, f"Copied {files_text} to {WORK_DIR} in {plural(len(pods), 'pod')}.")
