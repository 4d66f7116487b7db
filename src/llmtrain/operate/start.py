"""Starting a run on the cluster: a new one, or one that has ended."""

from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import AlreadyExists
from llmtrain.kubernetes.client import Cluster
from llmtrain.launch import lifecycle
from llmtrain.launch.lifecycle import OnWait
from llmtrain.launch.plan import JobPlan
from llmtrain.launch.record import Record, find_record
from llmtrain.operate.status.run_status import run_status


def start_run(cluster: Cluster, plan: JobPlan, resume: bool, on_wait: OnWait | None = None) -> list[str]:
    """Create the run. `resume`: if it exists and has ended, launch it again. Returns old pods that remain."""
    try:
        lifecycle.submit(cluster, plan, keep_data=resume)
    except AlreadyExists:
        if not resume or cluster.get("v1", "ConfigMap", plan.config_map, plan.namespace) is None:
            raise
        record = find_record(cluster, plan.run_id, plan.namespace)
        check_ended(cluster, record)
        return lifecycle.resume(cluster, record, plan, on_wait)
    return []


def check_ended(cluster: Cluster, record: Record) -> None:
    """Refuse a run that has not ended."""
    status = run_status(cluster, record, with_usage=False)
    if not status.has_ended:
        run = f"{record.run_id}{cluster.place(record.namespace)}"
        raise UsageError(
            f"Run '{record.run_id}' has not ended (state: {status.state}).",
            remedy=f"Watch it (llmtrain status {run} --watch) or stop it first (llmtrain stop {run}).",
        )
