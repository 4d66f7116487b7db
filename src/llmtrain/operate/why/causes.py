"""All causes, the most certain first: the first that is recognised is the one, and no other is told."""

from llmtrain.operate.why import causes_exit as end
from llmtrain.operate.why import causes_stall as silent
from llmtrain.operate.why import causes_startup as start
from llmtrain.operate.why import causes_state as state
from llmtrain.operate.why import causes_user_error as mistake
from llmtrain.operate.why.diagnosis import Cause, Diagnosis
from llmtrain.operate.why.snapshot import Snapshot

CAUSES = (
    # What the run's record and its job say themselves.
    Cause("finished", state.finished),
    Cause("stopped", state.stopped),
    Cause("removed", state.removed),
    Cause("incomplete", state.incomplete),
    Cause("queue_not_found", state.queue_not_found),
    Cause("queued", state.queued),
    Cause("suspended", state.suspended),
    Cause("scaled", state.scaled),
    Cause("deadline_exceeded", state.deadline_exceeded),
    # Mistakes: others end because of them, never the other way round.
    Cause("prefetch_failed", mistake.prefetch_failed),
    Cause("bad_config", mistake.bad_config),
    Cause("nan", mistake.nan),
    Cause("gpu_out_of_memory", mistake.gpu_out_of_memory),
    Cause("disk_full", mistake.disk_full),
    Cause("given_up", mistake.given_up),
    Cause("bad_checkpoint", mistake.bad_checkpoint),
    Cause("bad_data", mistake.bad_data),
    # What holds the run up now, whatever ended it before.
    Cause("node_lost", start.node_lost),
    Cause("stopping", state.stopping),
    Cause("image_pull", start.image_pull),
    Cause("container_config", start.container_config),
    Cause("claim", start.claim),
    Cause("quota_exceeded", start.quota_exceeded),
    Cause("admission_refused", start.admission_refused),
    Cause("unschedulable", start.unschedulable),
    # What ended it: codes of its own before those that come of another's end.
    Cause("oom_killed", end.oom_killed),
    Cause("preempted", end.preempted),
    Cause("evicted", end.evicted),
    Cause("killed", end.killed),
    Cause("crash", end.crash),
    Cause("master_unreachable", end.master_unreachable),
    Cause("rank_hung", end.rank_hung),
    Cause("interrupted", end.interrupted),
    Cause("peer_lost", end.peer_lost),
    Cause("no_restarts_left", state.no_restarts_left),
    Cause("job_failed", state.job_failed),
    # Nothing that went wrong, as far as it shows.
    Cause("prefetching", state.prefetching),
    Cause("pulling_image", state.pulling_image),
    Cause("no_pods_made", state.no_pods_made),
    Cause("rank_hung", silent.rank_silent),
    Cause("no_progress", silent.no_progress),
    Cause("starting", state.starting),
    Cause("healthy", state.healthy),
)
NO_TROUBLE = ("starting", "healthy")
"""What is said where nothing shows: a run that is silent is looked at closer then."""


def find_cause(snapshot: Snapshot) -> tuple[str, Diagnosis]:
    for cause in CAUSES:
        found = cause.find(snapshot)
        if found is not None:
            return cause.id, found
    return "unknown", Diagnosis(
        f"Nothing tells why run {snapshot.record.run_id} is {snapshot.status.state}.",
        [f"State {snapshot.status.state}, {len(snapshot.pods)} of {snapshot.wanted} pods."],
        f"llmtrain status {snapshot.run} and llmtrain logs {snapshot.run} show what there is.",
    )
