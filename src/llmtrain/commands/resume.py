"""llmtrain resume: launch a run again from its newest checkpoint, optionally on another number of nodes."""

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
    WithCodeOption,
    read_own_code,
    short_options,
    warn_of,
)
from llmtrain.commands.options import JsonOption, SetOption
from llmtrain.commands.stop import PodCount, warn_of_stuck_pods
from llmtrain.errors import UsageError


def command(
    run: RunArgument,
    set_: SetOption = None,
    kind: KindOption = None,
    nodes: NodesOption = None,
    processes_per_node: ProcessesOption = None,
    image: ImageOption = None,
    with_code: WithCodeOption = None,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    detach: DetachOption = False,
    recover: RecoverOption = None,
    json_: JsonOption = False,
) -> None:
    """Launch a run again with its recorded config. It resumes from its newest checkpoint."""
    from llmtrain.commands.watch import check_watching, follow_run
    from llmtrain.config.document import parse_document
    from llmtrain.config.load import build_config, dump_config
    from llmtrain.launch import lifecycle
    from llmtrain.launch.plan import plan_job
    from llmtrain.launch.record import check_applied, find_record
    from llmtrain.operate.start import check_ended

    check_watching(detach, recover)
    cluster = connect(kubeconfig, context, run)
    record = find_record(cluster, run, namespace or cluster.namespace)
    check_ended(cluster, record)
    if record.unknown:
        raise UsageError(
            f"Run '{run}' was launched by another version of llmtrain; unknown fields: {', '.join(record.unknown)}.",
            remedy="Resume it with that version, or use `launch --resume` with a config of this version.",
        )
    overrides = [*(set_ or []), *short_options(kind, nodes, processes_per_node, image)]
    changed = build_config(
        parse_document(dump_config(record.config), f"the config of {run}"), overrides, is_recorded=True
    )
    code = read_own_code(changed, f"the config of {run}", with_code) if with_code is not None else record.code
    plan = plan_job(changed, record.work, code=code)
    if (plan.run_id, plan.namespace) != (record.run_id, record.namespace):
        raise UsageError(
            f"A resume cannot change the name or namespace of run '{run}'.", remedy="Remove them from --set."
        )
    check_applied(record, changed, plan)
    warn_of(plan, cluster.name)
    warn_of_stuck_pods(lifecycle.resume(cluster, record, plan, PodCount()))
    follow_run(cluster, plan.run_id, plan.namespace, detach=detach, recover_after=recover, json_=json_)
