"""What the state of a run alone tells: ended, waiting for something normal, or well."""

from llmtrain.kubernetes.api_errors import one_line
from llmtrain.operate.status.container_exits import age_of
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.pods import current_container
from llmtrain.operate.status.state import code_text, scaled_text, scaled_to
from llmtrain.operate.status.view import age_text, phase_counts, progress_texts
from llmtrain.operate.why.diagnosis import Diagnosis, go_on
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.text import plural

NO_PODS_SEC = 60.0  # in which whoever makes pods has begun
_KUEUE_WORDS = ("Preempted", "Evicted", "Stopped", "Pending", "Suspended", "QuotaReserved")


def finished(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "finished":
        return None
    run, status = snapshot.run, snapshot.status
    return Diagnosis(
        f"Nothing is wrong: run {snapshot.record.run_id} is finished{_at_step(snapshot)}.",
        [f"State finished, exit code 0, {plural(status.restarts, 'restart')}."],
        f"llmtrain fetch {run} brings it here; llmtrain delete {run} removes it.",
    )


def stopped(snapshot: Snapshot) -> Diagnosis | None:
    """By somebody; what it had come to before is kept."""
    record = snapshot.record
    is_failed = snapshot.status.state == "failed" and snapshot.job is None
    if snapshot.status.state != "stopped" and not is_failed:
        return None
    had = "had failed before, and its objects were removed" if is_failed else "was stopped by somebody"
    lost = [f"{pod.name} is still there: its machine is lost." for pod, _ in snapshot.pods]
    return Diagnosis(
        f"Run {record.run_id} {had} (llmtrain stop) at {record.stopped_at}.",
        [f"Its record says: stopped at {record.stopped_at}{', failed' if is_failed else ''}.", *lost],
        f"llmtrain resume {snapshot.run} goes on with it; llmtrain logs {snapshot.run} reads what it said.",
    )


def removed(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "removed":
        return None
    ttl = snapshot.record.config.launch.ttl_sec
    return Diagnosis(
        f"The {snapshot.record.workload.kind} {snapshot.record.run_id} is gone, and not by llmtrain stop: deleted by "
        "somebody" + (f", or launch.ttl_sec ({ttl} s) is over." if ttl is not None else "."),
        ["There is neither a job nor a pod, and the record of the run is not marked as stopped."],
        f"llmtrain resume {snapshot.run} goes on with it; llmtrain logs {snapshot.run} reads what it said.",
    )


def incomplete(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "incomplete":
        return None
    return Diagnosis(
        f"The launch of {snapshot.record.run_id} was cut short: its job was never made.",
        ["There is a record of the run, but no job, and nothing that a job brings about has happened."],
        f"llmtrain resume {snapshot.run} makes it whole; llmtrain delete {snapshot.run} clears it away.",
    )


def queue_not_found(snapshot: Snapshot) -> Diagnosis | None:
    queue, record = snapshot.record.config.launch.queue, snapshot.record
    if snapshot.queue.has_queue is not False:
        return None
    return Diagnosis(
        f"Namespace {record.namespace} has no LocalQueue {queue} (launch.queue): the run waits until there is one.",
        [f"The {record.workload.kind} is suspended.", *snapshot.queue.conditions],
        f"kubectl get localqueues{snapshot.place} lists the queues. Name one: {go_on(snapshot, 'launch.queue=NAME')}. "
        f"Or create {queue}: the run then starts by itself.",
    )


def queued(snapshot: Snapshot) -> Diagnosis | None:
    """Kueue holds it back. Its own words are in the Workload that it makes of the job, and in events of both."""
    queue = snapshot.record.config.launch.queue
    if not queue or snapshot.status.state != "suspended":
        return None
    said = [f"Event {e['reason']}: {one_line(e.get('message', ''))}" for e in snapshot.about(*_KUEUE_WORDS)]
    waits_for = f": {snapshot.queue.waits_for}" if snapshot.queue.waits_for else ""
    return Diagnosis(
        f"The run waits in Kueue's queue {queue} (launch.queue){waits_for}.",
        [
            f"The {snapshot.record.workload.kind} is suspended.",
            *_condition_lines(snapshot),
            *(snapshot.queue.conditions or said[:2]),
        ],
        f"It starts by itself when the queue has room. Ask for less (launch.resources, launch.nodes) or name another "
        f"queue: {go_on(snapshot, 'launch.queue=NAME')}.",
    )


def suspended(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "suspended":
        return None
    kind, record = snapshot.record.workload.kind, snapshot.record
    return Diagnosis(
        f"Somebody has suspended the {kind}: launch.queue names no queue that would.",
        [f"The {kind} is suspended.", *_condition_lines(snapshot)],
        f"kubectl patch {kind.lower()} {record.run_id}{snapshot.place} --type merge -p "
        '\'{"spec":{"suspend":false}}\' lets it go on (PyTorchJob: spec.runPolicy.suspend).',
    )


def scaled(snapshot: Snapshot) -> Diagnosis | None:
    """kubectl scale changes the number of pods, and not the number that the run was launched with."""
    replicas = scaled_to(snapshot.record, snapshot.job) if snapshot.is_active else None
    if replicas is None:
        return None
    record = snapshot.record
    fewest, most = record.config.launch.node_range
    nearest = fewest if replicas < fewest else most
    back = f"kubectl scale statefulset {record.run_id}{snapshot.place} --replicas={nearest}"
    change = f"Change the number of nodes: {go_on(snapshot)} --nodes {replicas}. " if replicas else ""
    waits = f"waits for pods 0 to {fewest - 1}" if replicas < fewest else f"uses pods 0 to {most - 1}; the others wait"
    return Diagnosis(
        f"T{scaled_text(record, replicas)[1:]}.",
        [f"spec.replicas of the StatefulSet is {replicas}. The run {waits}.", f"State {snapshot.status.state}."],
        f"{change}Or scale back: {back}; the run then continues from its newest checkpoint.",
    )


def deadline_exceeded(snapshot: Snapshot) -> Diagnosis | None:
    said = _failed_by(snapshot, "DeadlineExceeded", "active longer than specified deadline")
    if said is None:
        return None
    deadline = snapshot.record.config.launch.active_deadline_sec
    reached = _at_step(snapshot, ", it came to")
    return Diagnosis(
        f"The run took longer than it may: launch.active_deadline_sec is {deadline} s{reached}.",
        [said],
        f"Give it more time: {go_on(snapshot, 'launch.active_deadline_sec=SECONDS')}. It goes on where it was.",
    )


def no_restarts_left(snapshot: Snapshot) -> Diagnosis | None:
    said = _failed_by(snapshot, "BackoffLimitExceeded", "backoff limit")
    if said is None:
        return None
    return Diagnosis(
        f"No restarts are left: launch.max_restarts is {snapshot.record.config.launch.max_restarts}.",
        [said, "Of the pods that failed nothing is left that says why."],
        f"llmtrain logs {snapshot.run} reads what the run said. Go on: {go_on(snapshot)}.",
    )


def job_failed(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "failed":
        return None
    said = _condition_lines(snapshot)
    return Diagnosis(
        f"The {snapshot.record.workload.kind} has failed"
        + (f": {said[-1]}" if said else ", and nothing is left that says why."),
        said or [f"Pods: {phase_counts([pod for pod, _ in snapshot.pods]) or 'none'}."],
        f"llmtrain logs {snapshot.run} reads what the run said. Go on: {go_on(snapshot)}.",
    )


def _failed_by(snapshot: Snapshot, reason: str, words: str) -> str | None:
    """The line of the condition. Operators have one reason for all, and say it in their message. A Job whose pods are
    still ending has FailureTarget."""
    for row in snapshot.conditions:
        said = str(row.get("message") or "")
        if row["type"] in ("Failed", "FailureTarget") and (row.get("reason") == reason or words in said):
            return f"Condition {row['type']} of the job: {row.get('reason') or ''}: {one_line(said)}"
    return None


def _condition_lines(snapshot: Snapshot) -> list[str]:
    rows = [row for row in snapshot.conditions if row.get("message") or row.get("reason")]
    return [f"Condition {row['type']}: {row.get('reason', '')}: {one_line(row.get('message') or '')}" for row in rows]


def stopping(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "stopping":
        return None
    leaving = [pod.name for pod, _ in snapshot.pods if pod.phase == "Terminating"]
    grace = snapshot.record.config.launch.grace_period_sec
    return Diagnosis(
        f"The run is being stopped: {plural(len(snapshot.pods), 'pod')} may take up to {grace} s to save "
        "(launch.grace_period_sec).",
        [f"Being removed: {', '.join(leaving[:8]) or 'the job itself'}."],
        "Wait for it.",
    )


def prefetching(snapshot: Snapshot) -> Diagnosis | None:
    for pod, raw in snapshot.pods if snapshot.is_held_up else ():
        rows = raw.get("status", {}).get("initContainerStatuses") or []
        row = next((r for r in rows if r["name"] == "prefetch" and "running" in (r.get("state") or {})), None)
        if row is not None:
            since = age_text(age_of(row["state"]["running"]["startedAt"]))
            return Diagnosis(
                f"The run fetches its model or data from the hub, since {since}.",
                [f"{pod.name} (node {pod.index}): its init container prefetch runs."],
                f"Wait for it. A models volume (launch.models_volume) keeps what was fetched. Else: llmtrain status "
                f"{snapshot.run} --watch.",
            )
    return None


def pulling_image(snapshot: Snapshot) -> Diagnosis | None:
    if not snapshot.is_held_up:
        return None
    pulled = {str(e["involvedObject"].get("name")) for e in snapshot.about("Pulled")}
    waits = {pod.name: pod for pod, _ in snapshot.pods if pod.phase == "Pending" and pod.reason is None}
    for event in snapshot.about("Pulling"):
        name = str(event["involvedObject"].get("name"))
        if name in waits and name not in pulled:
            pod, since = waits[name], age_text(age_of(event_time(event)))
            return Diagnosis(
                f"The image {snapshot.record.config.launch.image} is being pulled, since {since}.",
                [f"{name} on {pod.node}: {one_line(event.get('message', ''))}"],
                "Wait for it; the first time on a machine takes as long as the image is big.",
            )
    return None


def no_pods_made(snapshot: Snapshot) -> Diagnosis | None:
    """A job that nobody has looked at: the operator of its kind is not running."""
    if snapshot.status.state != "pending" or snapshot.pods or snapshot.status.age_sec < NO_PODS_SEC or snapshot.events:
        return None
    kind = snapshot.record.workload.kind
    if snapshot.hidden:  # its events could tell otherwise
        return None
    return Diagnosis(
        f"Nothing makes pods of the {kind}: whoever is to do that does not run.",
        [f"The {kind} is there for {age_text(snapshot.status.age_sec)}, without a pod and without an event."],
        f"Ask whoever runs the cluster for the operator of {kind}; --kind indexed_job needs none: llmtrain stop "
        f"{snapshot.run}, then llmtrain resume {snapshot.run} --kind indexed_job.",
    )


def starting(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state not in ("pending", "starting", "restarting"):
        return None
    status, words = snapshot.status, {"restarting": "starts again", "pending": "waits for its pods"}
    made = [f"{pod.name} (node {pod.index}): {_doing(snapshot, pod.index)}" for pod, _ in snapshot.pods[:8]]
    return Diagnosis(
        f"Nothing is wrong that shows: the run {words.get(status.state, 'is starting')}, launched "
        f"{age_text(status.age_sec)} ago.",
        [f"{len(snapshot.pods)} of {snapshot.wanted} pods are there.", *made],
        f"Wait a little; llmtrain status {snapshot.run} --watch shows how it goes.",
    )


def _doing(snapshot: Snapshot, index: int) -> str:
    pod, raw = next(row for row in snapshot.pods if row[0].index == index)
    state = current_container(raw, snapshot.record.workload.container).get("state") or {}
    return (
        f"{pod.phase}, {(state.get('waiting') or {}).get('reason') or 'on its way'}" if not pod.is_running else "runs"
    )


def healthy(snapshot: Snapshot) -> Diagnosis | None:
    if not snapshot.is_running:
        return None
    status = snapshot.status
    words = [f"{status.step}/{status.max_steps or '-'}"] if status.step is not None else []
    ends = [pod for pod, _ in snapshot.pods if pod.last_exit_code]
    before = [
        f"Node {pod.index} ended with {code_text(pod.last_exit_code)}, and was started again." for pod in ends[:8]
    ]
    others = [f"{pod.name}: {pod.phase}, {pod.reason or 'no reason'}" for pod, _ in snapshot.pods if not pod.is_running]
    return Diagnosis(
        f"Nothing is wrong: the run trains{_at_step(snapshot)}." if words else "Nothing is wrong: the run's pods run.",
        [
            f"State running, pods: {phase_counts([pod for pod, _ in snapshot.pods])}.",
            *([f"Step {', '.join([*words, *progress_texts(status)])}."] if words else []),
            *before,
            *others[:8],
        ],
        f"Nothing is to be done; llmtrain status {snapshot.run} --watch shows it.",
    )


def _at_step(snapshot: Snapshot, words: str = " at") -> str:
    step, steps = snapshot.status.step, snapshot.status.max_steps
    return "" if step is None else f"{words} step {step}{f' of {steps}' if steps else ''}"
