"""Starting a run on the cluster: a new one, or one that has ended."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmtrain.config.document import parse_document
from llmtrain.config.load import build_config, dump_config, flat_overrides
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch import lifecycle
from llmtrain.launch.job import JobPlan
from llmtrain.launch.job_warnings import image_warning
from llmtrain.launch.lifecycle import OnWait
from llmtrain.launch.plan_job import plan_job
from llmtrain.launch.plugin_code import plugin_code
from llmtrain.launch.pod_memory import memory_warnings
from llmtrain.launch.record import check_applied, find_record
from llmtrain.operate.observed_run import ObservedRun

OnWarning = Callable[[str], None]


def ignore_warning(text: str) -> None:
    pass


def start_run(cluster: Cluster, plan: JobPlan, resume: bool, on_wait: OnWait | None = None) -> list[str]:
    """Create the run. `resume`: if it exists and has ended, launch it again. Returns old pods that remain."""
    try:
        lifecycle.submit(cluster, plan, keep_data=resume)
    except AlreadyExists:
        # Without a record, what exists is not a run but another object of one of its names.
        if not resume or cluster.get("v1", "ConfigMap", plan.config_map, plan.namespace) is None:
            raise
        record = find_record(cluster, plan.run_id, plan.namespace)
        check_ended(ObservedRun(cluster, record, with_usage=False))
        return lifecycle.resume(cluster, record, plan, on_wait)
    return []


def check_ended(run: ObservedRun) -> None:
    """Refuse a run that has not ended."""
    if not run.status.has_ended:
        raise UsageError(
            f"Run '{run.run_id}' has not ended (state: {run.status.state}).",
            remedy=f"Watch it (llmtrain status {run.in_commands} --watch) or stop it first (llmtrain stop "
            f"{run.in_commands}).",
        )


def plan_resume(
    run: ObservedRun, overrides: Mapping[str, Any] | Sequence[str], with_code: str | None, on_warning: OnWarning
) -> JobPlan:
    """The plan of the next launch of a run that has ended: its recorded config with these changes."""
    record = run.record
    check_ended(run)
    if record.unknown:
        raise UsageError(
            f"Run '{run.run_id}' was launched by another version of llmtrain; unknown fields: "
            f"{', '.join(record.unknown)}.",
            remedy="Resume it with that version, or use `launch --resume` with a config of this version.",
        )
    source = f"the config of {run.run_id}"
    changes = flat_overrides(overrides) if isinstance(overrides, Mapping) else list(overrides)
    changed = build_config(parse_document(dump_config(record.config), source), changes, is_recorded=True)
    code = record.code  # that of the last launch
    if with_code is not None:
        code, warnings = plugin_code(changed, source, with_code)
        for warning in warnings:
            on_warning(warning)
    plan = plan_job(changed, record.task, code=code)
    if (plan.run_id, plan.namespace) != (record.run_id, record.namespace):
        raise UsageError(
            f"A resume cannot change the name or namespace of run '{run.run_id}'.", remedy="Remove them from --set."
        )
    check_applied(record, changed, plan)
    for warning in (*plan_warnings(plan, run.cluster.name), *memory_warnings(plan)):
        on_warning(warning)
    return plan


def plan_warnings(plan: JobPlan, context: str | None) -> list[str]:
    """`context`: the kubeconfig context, if known."""
    warnings = list(plan.warnings)
    image = image_warning(plan.launch, context)
    if image:
        warnings.append(image)
    return warnings


def take_back(run: ObservedRun) -> str:
    """Roll back a launch that cannot start. Returns what was done, in one sentence."""
    try:
        kept = lifecycle.take_back(run.cluster, run.record)
    except LlmtrainError as problem:
        return f"The launch was only partly rolled back ({problem.what}): run llmtrain delete {run.in_commands}."
    if kept:
        return f"The launch was rolled back; {', '.join(kept)} was kept."
    return "The launch was rolled back."
