"""All causes, the most certain first. Only the first that applies is reported."""

from llmtrain.operate.why import causes_exit as exits
from llmtrain.operate.why import causes_stall as stall
from llmtrain.operate.why import causes_startup as startup
from llmtrain.operate.why import causes_state as state
from llmtrain.operate.why import causes_user_error as user_error
from llmtrain.operate.why.diagnosis import Cause, Diagnosis
from llmtrain.operate.why.snapshot import Snapshot

CAUSES = (
    # Stated by the run's record and its job.
    Cause("finished", state.finished),
    Cause("stopped", state.stopped),
    Cause("removed", state.removed),
    Cause("incomplete", state.incomplete),
    Cause("queue_not_found", state.queue_not_found),
    Cause("queued", state.queued),
    Cause("suspended", state.suspended),
    Cause("scaled", state.scaled),
    Cause("deadline_exceeded", state.deadline_exceeded),
    # User errors: they make other processes exit, never the other way round.
    Cause("prefetch_failed", user_error.prefetch_failed),
    Cause("bad_config", user_error.bad_config),
    Cause("nan", user_error.nan),
    Cause("gpu_out_of_memory", user_error.gpu_out_of_memory),
    Cause("disk_full", user_error.disk_full),
    Cause("given_up", user_error.given_up),
    Cause("bad_checkpoint", user_error.bad_checkpoint),
    Cause("bad_data", user_error.bad_data),
    # What blocks the run now, regardless of earlier exits.
    Cause("node_lost", startup.node_lost),
    Cause("stopping", state.stopping),
    Cause("image_pull", startup.image_pull),
    Cause("container_config", startup.container_config),
    Cause("claim", startup.claim),
    Cause("quota_exceeded", startup.quota_exceeded),
    Cause("admission_refused", startup.admission_refused),
    Cause("unschedulable", startup.unschedulable),
    # Exits: root causes before those that follow from the exit of another process.
    Cause("oom_killed", exits.oom_killed),
    Cause("preempted", exits.preempted),
    Cause("evicted", exits.evicted),
    Cause("killed", exits.killed),
    Cause("crash", exits.crash),
    Cause("master_unreachable", exits.master_unreachable),
    Cause("rank_hung", exits.rank_hung),
    Cause("interrupted", exits.interrupted),
    Cause("peer_lost", exits.peer_lost),
    Cause("no_restarts_left", state.no_restarts_left),
    Cause("job_failed", state.job_failed),
    # No error so far.
    Cause("prefetching", state.prefetching),
    Cause("pulling_image", state.pulling_image),
    Cause("no_pods_made", state.no_pods_made),
    Cause("rank_hung", stall.rank_hung),
    Cause("no_progress", stall.no_progress),
    Cause("starting", state.starting),
    Cause("healthy", state.healthy),
)
NO_PROBLEM = ("starting", "healthy")
"""Causes after which the heartbeats are checked if the log has stopped."""


def find_cause(snapshot: Snapshot) -> tuple[str, Diagnosis]:
    for cause in CAUSES:
        diagnosis = cause.find(snapshot)
        if diagnosis is not None:
            return cause.id, diagnosis
    return "unknown", Diagnosis(
        f"No cause found for the state of run {snapshot.record.run_id}: {snapshot.status.state}.",
        [f"State {snapshot.status.state}, {len(snapshot.pods)} of {snapshot.expected_pods} pods."],
        f"Check llmtrain status {snapshot.run} and llmtrain logs {snapshot.run}.",
    )
