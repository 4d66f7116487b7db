"""Causes that follow from the state of a run: ended, waiting, or healthy."""

import json

from llmtrain.core.redact import redacted_line
from llmtrain.core.text import plural
from llmtrain.kubernetes.client import Object
from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.launch.job import PREFETCH
from llmtrain.operate.status.container_exits import pod_label
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.pods import PodStatus, current_container
from llmtrain.operate.status.state import code_text, scaled_text, scaled_to
from llmtrain.operate.status.view import age_text, phase_counts, progress_texts
from llmtrain.operate.why.diagnosis import MAX_LISTED, Diagnosis, resume_command
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.state import RunState

NO_PODS_SEC = 60.0  # a controller creates the first pod within this time
_STARTING: dict[str, str] = {
    RunState.PENDING: "waits for its pods",
    RunState.STARTING: "is starting",
    RunState.RESTARTING: "is restarting",
}
_KUEUE_REASONS = ("Preempted", "Evicted", "Stopped", "Pending", "Suspended", "QuotaReserved")


def finished(snapshot: Snapshot) -> Diagnosis | None:
    run = snapshot.run
    remedy = f"Delete it: llmtrain delete {run}."
    if snapshot.status.has_files:
        remedy = f"Download it: llmtrain fetch {run}. Or delete it: llmtrain delete {run}."
    return Diagnosis(
        f"No problem: run {snapshot.record.run_id} finished{_at_step(snapshot)}.",
        [f"State finished, exit code 0, {plural(snapshot.status.restarts, 'restart')}."],
        remedy,
    )


def stopped(snapshot: Snapshot) -> Diagnosis | None:
    """A run that had failed before it was stopped stays failed."""
    stopped_at = snapshot.record.stopped_at
    if snapshot.status.state == RunState.STOPPED:
        what = "was stopped"
        evidence = [f"Record of the run: stopped at {stopped_at}."]
    elif snapshot.status.state == RunState.FAILED and snapshot.job is None:
        what = "failed, and its objects were then deleted"
        evidence = [f"Record of the run: stopped at {stopped_at}, failed."]
    else:
        return None
    for pod, _ in snapshot.pods:
        evidence.append(f"{pod.name} still exists: its node is NotReady.")
    return Diagnosis(
        f"Run {snapshot.record.run_id} {what} (llmtrain stop) at {stopped_at}.",
        evidence,
        f"Resume it: llmtrain resume {snapshot.run}. Its log: llmtrain logs {snapshot.run}.",
    )


def removed(snapshot: Snapshot) -> Diagnosis | None:
    what = f"The {snapshot.record.kind.object_kind} {snapshot.record.run_id} was deleted, but not with llmtrain stop"
    ttl = snapshot.record.config.launch.ttl_sec
    if ttl is not None:
        what += f"; or launch.ttl_sec ({ttl} s) has expired"
    return Diagnosis(
        f"{what}.",
        ["No job and no pod exists, and the record of the run is not marked as stopped."],
        f"Resume it: llmtrain resume {snapshot.run}. Its log: llmtrain logs {snapshot.run}.",
    )


def incomplete(snapshot: Snapshot) -> Diagnosis | None:
    return Diagnosis(
        f"The launch of {snapshot.record.run_id} was interrupted before its job was created.",
        ["The record of the run exists, but no job, and there are no events of a job."],
        f"Finish the launch: llmtrain resume {snapshot.run}. Or delete it: llmtrain delete {snapshot.run}.",
    )


def queue_not_found(snapshot: Snapshot) -> Diagnosis | None:
    if snapshot.queue.has_queue is not False:  # None: unknown
        return None
    record = snapshot.record
    queue = record.config.launch.queue
    return Diagnosis(
        f"Namespace {record.namespace} has no LocalQueue {queue} (launch.queue).",
        [f"The {record.kind.object_kind} is suspended.", *snapshot.queue.conditions],
        f"List the queues: kubectl get localqueues{snapshot.place}. Select one: "
        f"{resume_command(snapshot, 'launch.queue=NAME')}. Or create {queue}: the run then starts automatically.",
    )


def queued(snapshot: Snapshot) -> Diagnosis | None:
    """Kueue reports the reason in the Workload that it creates for the job, and in events of both."""
    queue = snapshot.record.config.launch.queue
    if not queue:
        return None
    evidence = [f"The {snapshot.record.kind.object_kind} is suspended.", *_condition_lines(snapshot)]
    if snapshot.queue.conditions:
        evidence += snapshot.queue.conditions
    else:
        for event in snapshot.events_with_reason(*_KUEUE_REASONS)[:2]:
            evidence.append(f"Event {event['reason']}: {redacted_line(event.get('message', ''))}")
    what = f"The run waits in queue {queue} of Kueue (launch.queue)"
    if not snapshot.queue.has_workload:
        what += ": Kueue has created no Workload for it"
    elif snapshot.queue.waits_for:
        what += f": {snapshot.queue.waits_for}"
    return Diagnosis(f"{what}.", evidence, _queue_remedy(snapshot))


def _queue_remedy(snapshot: Snapshot) -> str:
    launch = snapshot.record.config.launch
    if not snapshot.queue.is_active:
        activate = """kubectl patch workload NAME --type merge -p '{"spec":{"active":true}}'"""
        return f"Its Workload was deactivated (kubectl get workloads lists it). Activate it: {activate}."
    if snapshot.queue.has_workload:
        other = resume_command(snapshot, "launch.queue=NAME")
        return (
            "The run starts automatically when the queue has capacity. Reduce launch.resources or launch.nodes, or "
            f"select another queue: {other}."
        )
    if launch.queue_priority:
        other = resume_command(snapshot, "launch.queue_priority=NAME")
        return (
            f"Check that the WorkloadPriorityClass {launch.queue_priority} (launch.queue_priority) exists: kubectl get "
            f"workloadpriorityclasses. Or select another one: {other}."
        )
    return (
        f"Check that Kueue is running, and that its configuration includes the kind {snapshot.record.kind.object_kind}."
    )


def suspended(snapshot: Snapshot) -> Diagnosis | None:
    kind = snapshot.record.kind.object_kind
    patch = json.dumps(snapshot.record.kind.unsuspend_patch, separators=(",", ":"))
    return Diagnosis(
        f"The {kind} was suspended by a user or controller: launch.queue is not set.",
        [f"The {kind} is suspended.", *_condition_lines(snapshot)],
        f"Resume it: kubectl patch {kind.lower()} {snapshot.record.run_id}{snapshot.place} --type merge -p '{patch}'.",
    )


def scaled(snapshot: Snapshot) -> Diagnosis | None:
    """kubectl scale changes the number of pods, but not the number of nodes of the run."""
    replicas = scaled_to(snapshot.record, snapshot.job) if snapshot.is_active else None
    if replicas is None:
        return None
    record = snapshot.record
    kind = record.kind.object_kind
    fewest, most = record.config.launch.node_range
    if replicas < fewest:
        nearest = fewest
        waits = f"waits for pods 0 to {fewest - 1}"
    else:
        nearest = most
        waits = f"uses pods 0 to {most - 1}; the others are idle"
    back = f"kubectl scale {kind.lower()} {record.run_id}{snapshot.place} --replicas={nearest}"
    remedy = f"Scale back: {back}; the run then resumes from its newest checkpoint."
    if replicas:
        remedy += f" Or change the number of nodes: {resume_command(snapshot)} --nodes {replicas}."
    text = scaled_text(record, replicas)
    return Diagnosis(
        f"{text[0].upper()}{text[1:]}.",
        [f"spec.replicas of the {kind} is {replicas}. The run {waits}.", f"State {snapshot.status.state}."],
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


def sidecar_failed(snapshot: Snapshot) -> Diagnosis | None:
    """Kubernetes counts a pod as failed if any of its containers has failed, also after the trainer has finished."""
    trainer = snapshot.record.kind.container
    for pod, raw in snapshot.pods:
        status = raw.get("status") or {}
        if status.get("phase") != "Failed":
            continue
        for row in status.get("containerStatuses") or []:
            name = row["name"]
            ended = (row.get("state") or {}).get("terminated") or {}
            code = ended.get("exitCode")
            if name != trainer and code:
                reason = ended.get("reason") or "Error"
                return Diagnosis(
                    f"Container {name} of pod {pod.index} failed, and with it the pod.",
                    [
                        f"{name} of {pod.name} ended with exit code {code} ({reason}).",
                        f"{trainer} ended with exit code {pod.exit_code}.",
                    ],
                    "It must end with exit code 0, or be an init container with restartPolicy Always, which Kubernetes "
                    f"does not count (launch.pod_patch). Then: {resume_command(snapshot)}.",
                )
    return None


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
    what = f"The {snapshot.record.kind.object_kind} failed for an unknown reason."
    evidence = _condition_lines(snapshot)
    if evidence:
        what = f"The {snapshot.record.kind.object_kind} failed: {evidence[-1]}"
    else:
        counts = phase_counts([pod for pod, _ in snapshot.pods])
        evidence = [f"Pods: {counts or 'none'}."]
    return Diagnosis(
        what,
        evidence,
        f"Check the log: llmtrain logs {snapshot.run}. Then: {resume_command(snapshot)}.",
    )


def _failure_condition(snapshot: Snapshot, reason: str, message_part: str) -> str | None:
    """Evidence line of the condition. Operators use one reason for all failures, so the message counts too. A Job whose
    pods are still terminating has FailureTarget."""
    for condition in snapshot.conditions:
        own_reason = condition.get("reason") or ""
        message = str(condition.get("message") or "")
        is_match = own_reason == reason or message_part in message
        if condition["type"] in ("Failed", "FailureTarget") and is_match:
            return f"Condition {condition['type']} of the job: {own_reason}: {redacted_line(message)}"
    return None


def _condition_lines(snapshot: Snapshot) -> list[str]:
    lines = []
    for condition in snapshot.conditions:
        reason = condition.get("reason", "")
        message = condition.get("message") or ""
        if message or reason:
            lines.append(f"Condition {condition['type']}: {reason}: {redacted_line(message)}")
    return lines


def stopping(snapshot: Snapshot) -> Diagnosis | None:
    terminating = [pod.name for pod, _ in snapshot.pods if pod.phase == "Terminating"]
    grace = snapshot.record.config.launch.grace_period_sec
    return Diagnosis(
        f"The run is being stopped: {plural(len(snapshot.pods), 'pod')} may take up to {grace} s to save a checkpoint "
        "(launch.grace_period_sec).",
        [f"Terminating: {', '.join(terminating[:MAX_LISTED]) or 'the job'}."],
        "Wait until it has stopped.",
    )


def prefetching(snapshot: Snapshot) -> Diagnosis | None:
    for pod, raw in snapshot.pods:
        for container in raw.get("status", {}).get("initContainerStatuses") or []:
            state = container.get("state") or {}
            if container["name"] == PREFETCH and "running" in state:
                age = age_text(seconds_since(state["running"]["startedAt"]))
                return Diagnosis(
                    f"The run has been downloading its model or data from the hub for {age}.",
                    [f"{pod_label(pod.index, pod.name)}: init container {PREFETCH} is running."],
                    "Wait until the download is complete. Set launch.models_volume to keep downloads. Watch it: "
                    f"llmtrain status {snapshot.run} --watch.",
                )
    return None


def pulling_image(snapshot: Snapshot) -> Diagnosis | None:
    pulled = {str(event["involvedObject"].get("name")) for event in snapshot.events_with_reason("Pulled")}
    pending = {pod.name: pod for pod, _ in snapshot.pods if pod.phase == "Pending" and pod.reason is None}
    for event in snapshot.events_with_reason("Pulling"):
        name = str(event["involvedObject"].get("name"))
        if name in pending and name not in pulled:
            age = age_text(seconds_since(event_time(event)))
            return Diagnosis(
                f"Image {snapshot.record.config.launch.image} is being pulled ({age} so far).",
                [f"{name} on {pending[name].node}: {redacted_line(event.get('message', ''))}"],
                "Wait until it is pulled. The first pull on a node can take minutes for a large image.",
            )
    return None


def no_pods_made(snapshot: Snapshot) -> Diagnosis | None:
    """The controller of the job's kind is probably not running."""
    is_early = snapshot.status.age_sec < NO_PODS_SEC
    if is_early or snapshot.pods or snapshot.events or snapshot.unreadable:  # unreadable: there may be events
        return None
    kind = snapshot.record.kind.object_kind
    return Diagnosis(
        f"No controller is creating pods for this {kind}.",
        [f"The {kind} has existed for {age_text(snapshot.status.age_sec)}, without pods and without events."],
        f"Check that {snapshot.record.kind.controller} is running. Or use a kind that needs no operator: "
        f"llmtrain stop {snapshot.run}, then llmtrain resume {snapshot.run} --kind indexed_job.",
    )


def starting(snapshot: Snapshot) -> Diagnosis | None:
    text = _STARTING[snapshot.status.state]
    evidence = [f"{len(snapshot.pods)} of {snapshot.expected_pods} pods exist."]
    for pod, raw in snapshot.pods[:MAX_LISTED]:
        evidence.append(f"{pod_label(pod.index, pod.name)}: {_pod_state(snapshot, pod, raw)}")
    return Diagnosis(
        f"No problem detected: the run {text}, launched {age_text(snapshot.status.age_sec)} ago.",
        evidence,
        f"Wait until it trains. Watch it: llmtrain status {snapshot.run} --watch.",
    )


def _pod_state(snapshot: Snapshot, pod: PodStatus, raw: Object) -> str:
    if pod.is_running:
        return "Running"
    state = current_container(raw, snapshot.record.kind.container).get("state") or {}
    reason = (state.get("waiting") or {}).get("reason")
    return f"{pod.phase}, {reason}" if reason else pod.phase


def healthy(snapshot: Snapshot) -> Diagnosis | None:
    status = snapshot.status
    pods = [pod for pod, _ in snapshot.pods]
    what = "No problem detected: the pods of the run are running."
    evidence = [f"State running, pods: {phase_counts(pods)}."]
    if status.step is not None:
        what = f"No problem detected: the run is training{_at_step(snapshot)}."
        progress = [f"{status.step}/{status.max_steps or '-'}", *progress_texts(status)]
        evidence.append(f"Step {', '.join(progress)}.")
    restarted = [pod for pod in pods if pod.last_exit_code]
    for pod in restarted[:MAX_LISTED]:
        evidence.append(f"Pod {pod.index} was restarted after exit {code_text(pod.last_exit_code)}.")
    not_running = [pod for pod in pods if not pod.is_running]
    for pod in not_running[:MAX_LISTED]:
        evidence.append(f"{pod.name}: {pod.phase}, {pod.reason or 'no reason'}")
    return Diagnosis(
        what,
        evidence,
        f"No action is needed. Watch it: llmtrain status {snapshot.run} --watch.",
    )


def _at_step(snapshot: Snapshot) -> str:
    status = snapshot.status
    if status.step is None:
        return ""
    if not status.max_steps:
        return f" at step {status.step}"
    return f" at step {status.step} of {status.max_steps}"
