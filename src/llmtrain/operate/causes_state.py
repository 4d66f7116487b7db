"""What the state of a run alone tells: ended, waiting for something normal, or well."""

from llmtrain.launch.explain import one_line
from llmtrain.operate.answers import Found, go_on
from llmtrain.operate.clues import Clues
from llmtrain.operate.container_ends import age_of
from llmtrain.operate.events import event_time
from llmtrain.operate.pods import current_container
from llmtrain.operate.state import code_text, scaled_text, scaled_to
from llmtrain.operate.view import age_text, count, phase_counts, progress_words

NO_PODS_SEC = 60.0  # in which whoever makes pods has begun
_KUEUE_WORDS = ("Preempted", "Evicted", "Stopped", "Pending", "Suspended", "QuotaReserved")


def finished(clues: Clues) -> Found | None:
    if clues.status.state != "finished":
        return None
    run, status = clues.run, clues.status
    return Found(
        f"Nothing is wrong: run {clues.record.run_id} is finished{_at_step(clues)}.",
        [f"State finished, exit code 0, {count(status.restarts, 'restart')}."],
        f"llmtrain fetch {run} brings it here; llmtrain delete {run} removes it.",
    )


def stopped(clues: Clues) -> Found | None:
    """By somebody; what it had come to before is kept."""
    record = clues.record
    is_failed = clues.status.state == "failed" and clues.job is None
    if clues.status.state != "stopped" and not is_failed:
        return None
    had = "had failed before, and its objects were removed" if is_failed else "was stopped by somebody"
    lost = [f"{pod.name} is still there: its machine is lost." for pod, _ in clues.pods]
    return Found(
        f"Run {record.run_id} {had} (llmtrain stop) at {record.stopped_at}.",
        [f"Its record says: stopped at {record.stopped_at}{', failed' if is_failed else ''}.", *lost],
        f"llmtrain resume {clues.run} goes on with it; llmtrain logs {clues.run} reads what it said.",
    )


def removed(clues: Clues) -> Found | None:
    if clues.status.state != "removed":
        return None
    ttl = clues.record.config.launch.ttl_sec
    return Found(
        f"The {clues.record.kind.kind} {clues.record.run_id} is gone, and not by llmtrain stop: deleted by somebody"
        + (f", or launch.ttl_sec ({ttl} s) is over." if ttl is not None else "."),
        ["There is neither a job nor a pod, and the record of the run is not marked as stopped."],
        f"llmtrain resume {clues.run} goes on with it; llmtrain logs {clues.run} reads what it said.",
    )


def incomplete(clues: Clues) -> Found | None:
    if clues.status.state != "incomplete":
        return None
    return Found(
        f"The launch of {clues.record.run_id} was cut short: its job was never made.",
        ["There is a record of the run, but no job, and nothing that a job brings about has happened."],
        f"llmtrain resume {clues.run} makes it whole; llmtrain delete {clues.run} clears it away.",
    )


def queue_not_found(clues: Clues) -> Found | None:
    queue, record = clues.record.config.launch.queue, clues.record
    if clues.queue.has_queue is not False:
        return None
    return Found(
        f"Namespace {record.namespace} has no LocalQueue {queue} (launch.queue): the run waits until there is one.",
        [f"The {record.kind.kind} is suspended.", *clues.queue.conditions],
        f"kubectl get localqueues{clues.place} lists the queues. Name one: {go_on(clues, 'launch.queue=NAME')}. Or "
        f"create {queue}: the run then starts by itself.",
    )


def queued(clues: Clues) -> Found | None:
    """Kueue holds it back. Its own words are in the Workload that it makes of the job, and in events of both."""
    queue = clues.record.config.launch.queue
    if not queue or clues.status.state != "suspended":
        return None
    said = [f"Event {e['reason']}: {one_line(e.get('message', ''))}" for e in clues.about(*_KUEUE_WORDS)]
    waits_for = f": {clues.queue.waits_for}" if clues.queue.waits_for else ""
    return Found(
        f"The run waits in Kueue's queue {queue} (launch.queue){waits_for}.",
        [
            f"The {clues.record.kind.kind} is suspended.",
            *_condition_lines(clues),
            *(clues.queue.conditions or said[:2]),
        ],
        f"It starts by itself when the queue has room. Ask for less (launch.resources, launch.nodes) or name another "
        f"queue: {go_on(clues, 'launch.queue=NAME')}.",
    )


def suspended(clues: Clues) -> Found | None:
    if clues.status.state != "suspended":
        return None
    kind, record = clues.record.kind.kind, clues.record
    return Found(
        f"Somebody has suspended the {kind}: launch.queue names no queue that would.",
        [f"The {kind} is suspended.", *_condition_lines(clues)],
        f"kubectl patch {kind.lower()} {record.run_id}{clues.place} --type merge -p "
        '\'{"spec":{"suspend":false}}\' lets it go on (PyTorchJob: spec.runPolicy.suspend).',
    )


def scaled(clues: Clues) -> Found | None:
    """kubectl scale changes the number of pods, and not the number that the run was launched with."""
    replicas = scaled_to(clues.record, clues.job) if clues.is_active else None
    if replicas is None:
        return None
    record = clues.record
    fewest, most = record.config.launch.node_range
    nearest = fewest if replicas < fewest else most
    back = f"kubectl scale statefulset {record.run_id}{clues.place} --replicas={nearest}"
    change = f"Change the number of nodes: {go_on(clues)} --nodes {replicas}. " if replicas else ""
    waits = f"waits for pods 0 to {fewest - 1}" if replicas < fewest else f"uses pods 0 to {most - 1}; the others wait"
    return Found(
        f"T{scaled_text(record, replicas)[1:]}.",
        [f"spec.replicas of the StatefulSet is {replicas}. The run {waits}.", f"State {clues.status.state}."],
        f"{change}Or scale back: {back}; the run then continues from its newest checkpoint.",
    )


def deadline_exceeded(clues: Clues) -> Found | None:
    said = _failed_by(clues, "DeadlineExceeded", "active longer than specified deadline")
    if said is None:
        return None
    deadline = clues.record.config.launch.active_deadline_sec
    reached = _at_step(clues, ", it came to")
    return Found(
        f"The run took longer than it may: launch.active_deadline_sec is {deadline} s{reached}.",
        [said],
        f"Give it more time: {go_on(clues, 'launch.active_deadline_sec=SECONDS')}. It goes on where it was.",
    )


def no_restarts_left(clues: Clues) -> Found | None:
    said = _failed_by(clues, "BackoffLimitExceeded", "backoff limit")
    if said is None:
        return None
    return Found(
        f"No restarts are left: launch.max_restarts is {clues.record.config.launch.max_restarts}.",
        [said, "Of the pods that failed nothing is left that says why."],
        f"llmtrain logs {clues.run} reads what the run said. Go on: {go_on(clues)}.",
    )


def job_failed(clues: Clues) -> Found | None:
    if clues.status.state != "failed":
        return None
    said = _condition_lines(clues)
    return Found(
        f"The {clues.record.kind.kind} has failed{f': {said[-1]}' if said else ', and nothing is left that says why.'}",
        said or [f"Pods: {phase_counts([pod for pod, _ in clues.pods]) or 'none'}."],
        f"llmtrain logs {clues.run} reads what the run said. Go on: {go_on(clues)}.",
    )


def _failed_by(clues: Clues, reason: str, words: str) -> str | None:
    """The line of the condition. Operators have one reason for all, and say it in their message. A Job whose pods are
    still ending has FailureTarget."""
    for row in clues.conditions:
        said = str(row.get("message") or "")
        if row["type"] in ("Failed", "FailureTarget") and (row.get("reason") == reason or words in said):
            return f"Condition {row['type']} of the job: {row.get('reason') or ''}: {one_line(said)}"
    return None


def _condition_lines(clues: Clues) -> list[str]:
    rows = [row for row in clues.conditions if row.get("message") or row.get("reason")]
    return [f"Condition {row['type']}: {row.get('reason', '')}: {one_line(row.get('message') or '')}" for row in rows]


def stopping(clues: Clues) -> Found | None:
    if clues.status.state != "stopping":
        return None
    leaving = [pod.name for pod, _ in clues.pods if pod.phase == "Terminating"]
    grace = clues.record.config.launch.grace_period_sec
    return Found(
        f"The run is being stopped: {count(len(clues.pods), 'pod')} may take up to {grace} s to save "
        "(launch.grace_period_sec).",
        [f"Being removed: {', '.join(leaving[:8]) or 'the job itself'}."],
        "Wait for it.",
    )


def prefetching(clues: Clues) -> Found | None:
    for pod, raw in clues.pods if clues.is_held_up else ():
        rows = raw.get("status", {}).get("initContainerStatuses") or []
        row = next((r for r in rows if r["name"] == "prefetch" and "running" in (r.get("state") or {})), None)
        if row is not None:
            since = age_text(age_of(row["state"]["running"]["startedAt"]))
            return Found(
                f"The run fetches its model or data from the hub, since {since}.",
                [f"{pod.name} (node {pod.index}): its init container prefetch runs."],
                f"Wait for it. A models volume (launch.models_volume) keeps what was fetched. Else: llmtrain status "
                f"{clues.run} --watch.",
            )
    return None


def pulling_image(clues: Clues) -> Found | None:
    if not clues.is_held_up:
        return None
    pulled = {str(e["involvedObject"].get("name")) for e in clues.about("Pulled")}
    waits = {pod.name: pod for pod, _ in clues.pods if pod.phase == "Pending" and pod.reason is None}
    for event in clues.about("Pulling"):
        name = str(event["involvedObject"].get("name"))
        if name in waits and name not in pulled:
            pod, since = waits[name], age_text(age_of(event_time(event)))
            return Found(
                f"The image {clues.record.config.launch.image} is being pulled, since {since}.",
                [f"{name} on {pod.node}: {one_line(event.get('message', ''))}"],
                "Wait for it; the first time on a machine takes as long as the image is big.",
            )
    return None


def no_pods_made(clues: Clues) -> Found | None:
    """A job that nobody has looked at: the operator of its kind is not running."""
    if clues.status.state != "pending" or clues.pods or clues.status.age_sec < NO_PODS_SEC or clues.events:
        return None
    kind = clues.record.kind.kind
    if clues.hidden:  # its events could tell otherwise
        return None
    return Found(
        f"Nothing makes pods of the {kind}: whoever is to do that does not run.",
        [f"The {kind} is there for {age_text(clues.status.age_sec)}, without a pod and without an event."],
        f"Ask whoever runs the cluster for the operator of {kind}; --kind indexed_job needs none: llmtrain stop "
        f"{clues.run}, then llmtrain resume {clues.run} --kind indexed_job.",
    )


def starting(clues: Clues) -> Found | None:
    if clues.status.state not in ("pending", "starting", "restarting"):
        return None
    status, words = clues.status, {"restarting": "starts again", "pending": "waits for its pods"}
    made = [f"{pod.name} (node {pod.index}): {_doing(clues, pod.index)}" for pod, _ in clues.pods[:8]]
    return Found(
        f"Nothing is wrong that shows: the run {words.get(status.state, 'is starting')}, launched "
        f"{age_text(status.age_sec)} ago.",
        [f"{len(clues.pods)} of {clues.wanted} pods are there.", *made],
        f"Wait a little; llmtrain status {clues.run} --watch shows how it goes.",
    )


def _doing(clues: Clues, index: int) -> str:
    pod, raw = next(row for row in clues.pods if row[0].index == index)
    state = current_container(raw, clues.record.kind.container).get("state") or {}
    return (
        f"{pod.phase}, {(state.get('waiting') or {}).get('reason') or 'on its way'}" if not pod.is_running else "runs"
    )


def healthy(clues: Clues) -> Found | None:
    if not clues.is_running:
        return None
    status = clues.status
    words = [f"{status.step}/{status.max_steps or '-'}"] if status.step is not None else []
    ends = [pod for pod, _ in clues.pods if pod.last_exit_code]
    before = [
        f"Node {pod.index} ended with {code_text(pod.last_exit_code)}, and was started again." for pod in ends[:8]
    ]
    others = [f"{pod.name}: {pod.phase}, {pod.reason or 'no reason'}" for pod, _ in clues.pods if not pod.is_running]
    return Found(
        f"Nothing is wrong: the run trains{_at_step(clues)}." if words else "Nothing is wrong: the run's pods run.",
        [
            f"State running, pods: {phase_counts([pod for pod, _ in clues.pods])}.",
            *([f"Step {', '.join([*words, *progress_words(status)])}."] if words else []),
            *before,
            *others[:8],
        ],
        f"Nothing is to be done; llmtrain status {clues.run} --watch shows it.",
    )


def _at_step(clues: Clues, words: str = " at") -> str:
    step, steps = clues.status.step, clues.status.max_steps
    return "" if step is None else f"{words} step {step}{f' of {steps}' if steps else ''}"
