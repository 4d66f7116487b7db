"""llmtrain resume: launch a run again from its newest checkpoint, optionally on another number of nodes."""

from llmtrain.commands.cluster_options import (
    RecoverOption,
    RunArgument,
    find_run,
)
from llmtrain.commands.launch import (
    DetachOption,
    ImageOption,
    KindOption,
    NodesOption,
    ProcessesOption,
    WithCodeOption,
    short_options,
)
from llmtrain.commands.options import CURRENT, JsonOption, SetOption, print_warning, with_option_groups
from llmtrain.commands.stop import PodCount, warn_of_stuck_pods
from llmtrain.core.arguments import ClusterPlace


@with_option_groups
def command(
    run: RunArgument,
    set_: SetOption = None,
    kind: KindOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    image: ImageOption = None,
    with_code: WithCodeOption = None,
    place: ClusterPlace = CURRENT,
    detach: DetachOption = False,
    recover: RecoverOption = None,
    json_: JsonOption = False,
) -> None:
    """Launch a run again with its recorded config. It resumes from its newest checkpoint."""
    from llmtrain.commands.watch import check_watching, follow_run

    check_watching(detach, recover)
    found = find_run(run, place)
    overrides = [*(set_ or []), *short_options(kind, nodes, processes_per_node, image)]
    lost = found.resume(overrides, with_code=with_code, on_warning=print_warning, on_wait=PodCount())
    warn_of_stuck_pods(lost)
    follow_run(found, detach=detach, recover_after=recover, json_=json_)
