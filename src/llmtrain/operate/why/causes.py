"""All causes, the most certain first. Only the first that applies is reported."""

from llmtrain.operate.why import causes_exit as exits
from llmtrain.operate.why import causes_stall as stall
from llmtrain.operate.why import causes_startup as startup
from llmtrain.operate.why import causes_state as states
from llmtrain.operate.why import causes_user_error as user_error
from llmtrain.operate.why.diagnosis import Cause, Diagnosis
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.state import RunState

WAITING = (RunState.PENDING, RunState.STARTING, RunState.RESTARTING)
"""Active but not training. An elastic run trains while some of its pods are pending."""
CAUSES = (
    # Stated by the run's record and its job.
    Cause("finished", states.finished, {RunState.FINISHED}),
    Cause("stopped", states.stopped),
    Cause("removed", states.removed, {RunState.REMOVED}),
    Cause("incomplete", states.incomplete, {RunState.INCOMPLETE}),
    Cause("queue_not_found", states.queue_not_found),
    Cause("queued", states.queued, {RunState.SUSPENDED}),
    Cause("suspended", states.suspended, {RunState.SUSPENDED}),
    Cause("scaled", states.scaled),
    Cause("deadline_exceeded", states.deadline_exceeded),
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
    Cause("stopping", states.stopping, {RunState.STOPPING}),
    Cause("image_pull", startup.image_pull, WAITING),
    Cause("container_config", startup.container_config, WAITING),
    Cause("claim", startup.claim, WAITING),
    Cause("quota_exceeded", startup.quota_exceeded, WAITING),
    Cause("admission_refused", startup.admission_refused, WAITING),
    Cause("unschedulable", startup.unschedulable, WAITING),
    # Exits: root causes before those that follow from the exit of another process.
    Cause("oom_killed", exits.oom_killed),
    Cause("preempted", exits.preempted, {RunState.FAILED, *WAITING}),
    Cause("evicted", exits.evicted, {RunState.FAILED, *WAITING}),
    Cause("killed", exits.killed),
    Cause("crash", exits.crash),
    Cause("master_unreachable", exits.master_unreachable),
    Cause("rank_hung", exits.rank_hung),  # the others have given up waiting for it
    Cause("interrupted", exits.interrupted),
    Cause("peer_lost", exits.peer_lost),
    Cause("sidecar_failed", states.sidecar_failed),
    Cause("no_restarts_left", states.no_restarts_left),
    Cause("job_failed", states.job_failed, {RunState.FAILED}),
    # No error so far.
    Cause("prefetching", states.prefetching, WAITING),
    Cause("pulling_image", states.pulling_image, WAITING),
    Cause("no_pods_made", states.no_pods_made, {RunState.PENDING}),
    Cause("rank_hung", stall.rank_hung),  # the others still wait for it
    Cause("no_progress", stall.no_progress, {RunState.RUNNING}),
    Cause("starting", states.starting, WAITING),
    Cause("healthy", states.healthy, {RunState.RUNNING}),
)
NO_PROBLEM = ("starting", "healthy")
"""Causes after which the heartbeats are checked if the log has stopped."""


def find_cause(snapshot: Snapshot) -> tuple[str, Diagnosis]:
    state = snapshot.status.state
    for cause in CAUSES:
        diagnosis = cause.find(snapshot) if state in cause.states else None
        if diagnosis is not None:
            return cause.id, diagnosis
    return "unknown", Diagnosis(
        f"No cause found for the state of run {snapshot.record.run_id}: {state}.",
        [f"State {state}, {len(snapshot.pods)} of {snapshot.expected_pods} pods."],
        f"Check llmtrain status {snapshot.run} and llmtrain logs {snapshot.run}.",
    )
