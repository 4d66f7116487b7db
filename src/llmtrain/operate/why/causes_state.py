"""Causes that follow from the state of a run: ended, waiting, or healthy."""

from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.operate.status.container_exits import PREFETCH, pod_label
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.pods import PodStatus, current_container
from llmtrain.operate.status.state import code_text, scaled_text, scaled_to
from llmtrain.operate.status.view import age_text, phase_counts, progress_texts
from llmtrain.operate.why.diagnosis import MAX_LISTED, Diagnosis, resume_command
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.redact import redacted_line
from llmtrain.text import plural

NO_PODS_SEC = 60.0  # a controller creates the first pod within this time
_CONTROLLERS = {
    "PyTorchJob": "the Kubeflow Training Operator",
    "TrainJob": "the Kubeflow Trainer",
    "JobSet": "the JobSet controller",
}
_KUEUE_REASONS = ("Preempted", "Evicted", "Stopped", "Pending", "Suspended", "QuotaReserved")


def finished(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "finished":
        return None
    run, status = snapshot.run, snapshot.status
    return Diagnosis(
        f"No problem: run {snapshot.record.run_id} finished{_at_step(snapshot)}.",
        [f"State finished, exit code 0, {plural(status.restarts, 'restart')}."],
        f"Download it: llmtrain fetch {run}. Or delete it: llmtrain delete {run}.",
    )


def stopped(snapshot: Snapshot) -> Diagnosis | None:
    """A run that had failed before it was stopped stays failed."""
    record = snapshot.record
    is_failed = snapshot.status.state == "failed" and snapshot.job is None
    if snapshot.status.state != "stopped" and not is_failed:
        return None
    what = "failed, and its objects were then deleted" if is_failed else "was stopped"
    lost = [f"{pod.name} still exists: its node is NotReady." for pod, _ in snapshot.pods]
    return Diagnosis(
        f"Run {record.run_id} {what} (llmtrain stop) at {record.stopped_at}.",
        [f"Record of the run: stopped at {record.stopped_at}{', failed' if is_failed else ''}.", *lost],
        f"Resume it: llmtrain resume {snapshot.run}. Its log: llmtrain logs {snapshot.run}.",
    )


def removed(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "removed":
        return None
    ttl = snapshot.record.config.launch.ttl_sec
    return Diagnosis(
        f"The {snapshot.record.workload.kind} {snapshot.record.run_id} was deleted, but not with llmtrain stop"
        + (f"; or launch.ttl_sec ({ttl} s) has expired." if ttl is not None else "."),
        ["No job and no pod exists, and the record of the run is not marked as stopped."],
        f"Resume it: llmtrain resume {snapshot.run}. Its log: llmtrain logs {snapshot.run}.",
    )


def incomplete(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "incomplete":
        return None
    return Diagnosis(
        f"The launch of {snapshot.record.run_id} was interrupted before its job was created.",
        ["The record of the run exists, but no job, and there are no events of a job."],
        f"Finish the launch: llmtrain resume {snapshot.run}. Or delete it: llmtrain delete {snapshot.run}.",
    )


def queue_not_found(snapshot: Snapshot) -> Diagnosis | None:
    queue, record = snapshot.record.config.launch.queue, snapshot.record
    if snapshot.queue.has_queue is not False:
        return None
    return Diagnosis(
        f"Namespace {record.namespace} has no LocalQueue {queue} (launch.queue).",
        [f"The {record.workload.kind} is suspended.", *snapshot.queue.conditions],
        f"List the queues: kubectl get localqueues{snapshot.place}. Select one: "
        f"{resume_command(snapshot, 'launch.queue=NAME')}. Or create {queue}: the run then starts automatically.",
    )


def queued(snapshot: Snapshot) -> Diagnosis | None:
    """Kueue reports the reason in the Workload that it creates for the job, and in events of both."""
    queue = snapshot.record.config.launch.queue
    if not queue or snapshot.status.state != "suspended":
        return None
    events = snapshot.events_with_reason(*_KUEUE_REASONS)[:2]
    event_lines = [f"Event {event['reason']}: {redacted_line(event.get('message', ''))}" for event in events]
    waits_for = f": {snapshot.queue.waits_for}" if snapshot.queue.waits_for else ""
    return Diagnosis(
        f"The run waits in queue {queue} of Kueue (launch.queue){waits_for}.",
        [
            f"The {snapshot.record.workload.kind} is suspended.",
            *_condition_lines(snapshot),
            *(snapshot.queue.conditions or event_lines),
        ],
        "The run starts automatically when the queue has capacity. Reduce launch.resources or launch.nodes, or select "
        f"another queue: {resume_command(snapshot, 'launch.queue=NAME')}.",
    )


def suspended(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "suspended":
        return None
    kind, record = snapshot.record.workload.kind, snapshot.record
    return Diagnosis(
        f"The {kind} was suspended by a user or controller: launch.queue is not set.",
        [f"The {kind} is suspended.", *_condition_lines(snapshot)],
        f"Resume it: kubectl patch {kind.lower()} {record.run_id}{snapshot.place} --type merge "
        f"-p '{_unsuspend(kind)}'.",
    )


def _unsuspend(kind: str) -> str:
    spec = '{"runPolicy":{"suspend":false}}' if kind == "PyTorchJob" else '{"suspend":false}'
    return f'{{"spec":{spec}}}'


def scaled(snapshot: Snapshot) -> Diagnosis | None:
    """kubectl scale changes the number of pods, but not the number of nodes of the run."""
    replicas = scaled_to(snapshot.record, snapshot.job) if snapshot.is_active else None
    if replicas is None:
        return None
    record = snapshot.record
    fewest, most = record.config.launch.node_range
    nearest = fewest if replicas < fewest else most
    back = f"kubectl scale statefulset {record.run_id}{snapshot.place} --replicas={nearest}"
    remedy = f"Scale back: {back}; the run then resumes from its newest checkpoint."
    if replicas:
        remedy += f" Or change the number of nodes: {resume_command(snapshot)} --nodes {replicas}."
    text = scaled_text(record, replicas)
    waits = (
        f"waits for pods 0 to {fewest - 1}" if replicas < fewest else f"uses pods 0 to {most - 1}; the others are idle"
    )
    return Diagnosis(
        f"{text[0].upper()}{text[1:]}.",
        [f"spec.replicas of the StatefulSet is {replicas}. The run {waits}.", f"State {snapshot.status.state}."],
        remedy,
    )


def deadline_exceeded(snapshot: Snapshot) -> Diagnosis | None:
    condition = _failure_condition(snapshot, "DeadlineExceeded", "active longer than specified deadline")
    if condition is None:
        return None
    deadline = snapshot.record.config.launch.active_deadline_sec
    return Diagnosis(
        f"The run exceeded its deadline{_at_step(snapshot)}: launch.active_deadline_sec is {deadline} s.",
        [condition],
        f"Raise the deadline: {resume_command(snapshot, 'launch.active_deadline_sec=SECONDS')}. The run resumes from "
        "its newest checkpoint.",
    )


def no_restarts_left(snapshot: Snapshot) -> Diagnosis | None:
    condition = _failure_condition(snapshot, "BackoffLimitExceeded", "backoff limit")
    if condition is None:
        return None
    return Diagnosis(
        f"No restarts are left: launch.max_restarts is {snapshot.record.config.launch.max_restarts}.",
        [condition, "The failed pods were deleted, and the reason with them."],
        f"Check the log: llmtrain logs {snapshot.run}. Then: {resume_command(snapshot)}.",
    )


def job_failed(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "failed":
        return None
    conditions = _condition_lines(snapshot)
    return Diagnosis(
        f"The {snapshot.record.workload.kind} failed"
        + (f": {conditions[-1]}" if conditions else " for an unknown reason."),
        conditions or [f"Pods: {phase_counts([pod for pod, _ in snapshot.pods]) or 'none'}."],
        f"Check the log: llmtrain logs {snapshot.run}. Then: {resume_command(snapshot)}.",
    )


def _failure_condition(snapshot: Snapshot, reason: str, message_part: str) -> str | None:
    """Evidence line of the condition. Operators use one reason for all failures, so the message counts too. A Job whose
    pods are still terminating has FailureTarget."""
    for condition in snapshot.conditions:
        kind, message = condition["type"], str(condition.get("message") or "")
        is_match = condition.get("reason") == reason or message_part in message
        if kind in ("Failed", "FailureTarget") and is_match:
            return f"Condition {kind} of the job: {condition.get('reason') or ''}: {redacted_line(message)}"
    return None


def _condition_lines(snapshot: Snapshot) -> list[str]:
    return [
        f"Condition {each['type']}: {each.get('reason', '')}: {redacted_line(each.get('message') or '')}"
        for each in snapshot.conditions
        if each.get("message") or each.get("reason")
    ]


def stopping(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state != "stopping":
        return None
    terminating = [pod.name for pod, _ in snapshot.pods if pod.phase == "Terminating"]
    grace = snapshot.record.config.launch.grace_period_sec
    return Diagnosis(
        f"The run is being stopped: {plural(len(snapshot.pods), 'pod')} may take up to {grace} s to save a checkpoint "
        "(launch.grace_period_sec).",
        [f"Terminating: {', '.join(terminating[:MAX_LISTED]) or 'the job'}."],
        "Wait until it has stopped.",
    )


def prefetching(snapshot: Snapshot) -> Diagnosis | None:
    for pod, raw in snapshot.pods if snapshot.is_waiting else ():
        statuses = raw.get("status", {}).get("initContainerStatuses") or []
        states = [each.get("state") or {} for each in statuses if each["name"] == PREFETCH]
        running = next((state["running"] for state in states if "running" in state), None)
        if running is not None:
            age = age_text(seconds_since(running["startedAt"]))
            return Diagnosis(
                f"The run has been downloading its model or data from the hub for {age}.",
                [f"{pod_label(pod.index, pod.name)}: init container {PREFETCH} is running."],
                "Wait until the download is complete. Set launch.models_volume to keep downloads. Watch it: llmtrain "
                f"status {snapshot.run} --watch.",
            )
    return None


def pulling_image(snapshot: Snapshot) -> Diagnosis | None:
    if not snapshot.is_waiting:
        return None
    pulled = {str(event["involvedObject"].get("name")) for event in snapshot.events_with_reason("Pulled")}
    pending = {pod.name: pod for pod, _ in snapshot.pods if pod.phase == "Pending" and pod.reason is None}
    for event in snapshot.events_with_reason("Pulling"):
        name = str(event["involvedObject"].get("name"))
        if name in pending and name not in pulled:
            pod, age = pending[name], age_text(seconds_since(event_time(event)))
            return Diagnosis(
                f"Image {snapshot.record.config.launch.image} is being pulled ({age} so far).",
                [f"{name} on {pod.node}: {redacted_line(event.get('message', ''))}"],
                "Wait until it is pulled. The first pull on a node can take minutes for a large image.",
            )
    return None


def no_pods_made(snapshot: Snapshot) -> Diagnosis | None:
    """The controller of the job's kind is probably not running."""
    if snapshot.status.state != "pending" or snapshot.pods or snapshot.status.age_sec < NO_PODS_SEC or snapshot.events:
        return None
    kind = snapshot.record.workload.kind
    if snapshot.unreadable:  # there may be events
        return None
    return Diagnosis(
        f"No controller is creating pods for this {kind}.",
        [f"The {kind} has existed for {age_text(snapshot.status.age_sec)}, without pods and without events."],
        f"Check that {_CONTROLLERS.get(kind, 'its operator')} is running. Or use a kind that needs no operator: "
        f"llmtrain stop {snapshot.run}, then llmtrain resume {snapshot.run} --kind indexed_job.",
    )


def starting(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.status.state not in ("pending", "starting", "restarting"):
        return None
    status, texts = snapshot.status, {"restarting": "is restarting", "pending": "waits for its pods"}
    return Diagnosis(
        f"No problem detected: the run {texts.get(status.state, 'is starting')}, launched "
        f"{age_text(status.age_sec)} ago.",
        [
            f"{len(snapshot.pods)} of {snapshot.expected_pods} pods exist.",
            *(
                f"{pod_label(pod.index, pod.name)}: {_pod_state(snapshot, pod, raw)}"
                for pod, raw in snapshot.pods[:MAX_LISTED]
            ),
        ],
        f"Wait until it trains. Watch it: llmtrain status {snapshot.run} --watch.",
    )


def _pod_state(snapshot: Snapshot, pod: PodStatus, raw: Object) -> str:
    if pod.is_running:
        return "Running"
    state = current_container(raw, snapshot.record.workload.container).get("state") or {}
    reason = (state.get("waiting") or {}).get("reason")
    return f"{pod.phase}, {reason}" if reason else pod.phase


def healthy(snapshot: Snapshot) -> Diagnosis | None:
    if not snapshot.is_running:
        return None
    status, pods = snapshot.status, [pod for pod, _ in snapshot.pods]
    what, evidence = "No problem detected: the pods of the run are running.", []
    if status.step is not None:
        what = f"No problem detected: the run is training{_at_step(snapshot)}."
        progress = [f"{status.step}/{status.max_steps or '-'}", *progress_texts(status)]
        evidence = [f"Step {', '.join(progress)}."]
    restarted = [pod for pod in pods if pod.last_exit_code][:MAX_LISTED]
    not_running = [pod for pod in pods if not pod.is_running][:MAX_LISTED]
    return Diagnosis(
        what,
        [
            f"State running, pods: {phase_counts(pods)}.",
            *evidence,
            *(f"Pod {pod.index} was restarted after exit {code_text(pod.last_exit_code)}." for pod in restarted),
            *(f"{pod.name}: {pod.phase}, {pod.reason or 'no reason'}" for pod in not_running),
        ],
        f"No action is needed. Watch it: llmtrain status {snapshot.run} --watch.",
    )


def _at_step(snapshot: Snapshot) -> str:
    step, max_steps = snapshot.status.step, snapshot.status.max_steps
    return "" if step is None else f" at step {step}{f' of {max_steps}' if max_steps else ''}"
