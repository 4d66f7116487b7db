"""llmtrain resume: go on with a run of the cluster that has ended, as it was or on another number of nodes."""

from llmtrain.commands.cluster_options import (
    ContextOption,
    KubeconfigOption,
    NamespaceOption,
    RecoverOption,
    RunArgument,
    connect,
)
from llmtrain.commands.launch import (
    DetachOption,
    ImageOption,
    KindOption,
    NodesOption,
    ProcessesOption,
    short_options,
    warn_of,
)
from llmtrain.commands.options import JsonOption, SetOption
from llmtrain.commands.stop import PodCount, warn_of_lost
from llmtrain.errors import UsageError


def command(
    run: RunArgument,
    set_: SetOption = None,
    kind: KindOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    image: ImageOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    detach: DetachOption = False,
    recover: RecoverOption = None,
    json_: JsonOption = False,
) -> None:
    """Launch a run again by the config it was launched with: it goes on from its newest checkpoint."""
    from llmtrain.commands.watch import check_ended, check_watching, follow_run
    from llmtrain.config.document import parse_document
    from llmtrain.config.load import build_config, dump_config
    from llmtrain.launch import lifecycle as apply
    from llmtrain.launch.plan import plan_job
    from llmtrain.launch.record import check_applied, find_record

    check_watching(detach, recover)
    cluster = connect(kubeconfig, context)
    record = find_record(cluster, run, namespace or cluster.namespace)
    check_ended(cluster, record)
    if record.unknown:
        raise UsageError(
            f"Run '{run}' was launched by another version of llmtrain: this one does not know "
            f"{', '.join(record.unknown)}.",
            remedy="Resume it with that version, or with `launch --resume` and a config of this one.",
        )
    overrides = [*(set_ or []), *short_options(kind, nodes, processes_per_node, image)]
    changed = build_config(parse_document(dump_config(record.config), f"the config of {run}"), overrides)
    plan = plan_job(changed, record.work)
    if (plan.run_id, plan.namespace) != (record.run_id, record.namespace):
        raise UsageError(
            f"Run '{run}' keeps its name and its namespace when it is resumed.", remedy="Leave them out of --set."
        )
    check_applied(record, changed, plan)
    warn_of(plan)
    warn_of_lost(apply.resume(cluster, record, plan, PodCount()))
    follow_run(cluster, plan.run_id, plan.namespace, detach=detach, recover_after=recover, json_=json_)
