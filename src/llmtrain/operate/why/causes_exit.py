"""Causes of container exits: exit codes, disruptions by the cluster, and error messages."""

from llmtrain.kubernetes.server_clock import seconds_since
from llmtrain.operate.status.container_exits import ContainerExit, pod_label
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.lost_nodes import find_condition
from llmtrain.operate.status.pods import PodStatus, container_state
from llmtrain.operate.status.view import memory_text
from llmtrain.operate.why.diagnosis import (
    Diagnosis,
    exit_code_text,
    exit_evidence,
    exit_with_code,
    other_exits,
    report_message,
    restart_note,
    resume_command,
)
from llmtrain.operate.why.log_patterns import last_line, traceback_end
from llmtrain.operate.why.snapshot import UNREACHABLE, Snapshot
from llmtrain.redact import redacted_line

MAX_EVENT_AGE_SEC = 900.0  # older events are not related to the current state
MAX_NAMED = 4  # pods, exits or ranks with an evidence line of their own
_PREEMPTION_REASONS = ("PreemptionByScheduler", "Preempting", "Preempted")
_CODES_OF_OTHER_CAUSES = (0, 64, 65, 69, 75, 137, 143)
# Reasons of the DisruptionTarget condition, of pods and of events.
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "deleted because of a taint of its node",
    "EvictionByEvictionAPI": "evicted: its node is being drained",
    "DeletionByPodGC": "deleted because its node was removed",
    "Preempted": "preempted by a pod of higher priority",
    "Evicted": "evicted",
    "TaintManagerEviction": "deleted because of a taint of its node",
    "TerminationByKubelet": "terminated by the kubelet: its node is short of resources or shuts down",
}


def oom_killed(snapshot: Snapshot) -> Diagnosis | None:
    exits = [each for each in snapshot.exits if each.reason == "OOMKilled"]
    if not exits:
        return None
    resources = snapshot.record.config.launch.resources
    usage = [
        f"{pod} uses {memory_text(memory)} of {resources.memory} now."
        for pod, memory in list(snapshot.usage.items())[:MAX_NAMED]
    ]
    more_memory = resume_command(snapshot, f"launch.resources.memory={_doubled(resources.memory)}")
    return Diagnosis(
        f"{exits[0].label} ran out of memory: its limit is {resources.memory} (launch.resources.memory), "
        f"of which up to {resources.shm_size} is shared memory.",
        [*(each.text for each in exits[:MAX_NAMED]), *usage, *other_exits(snapshot, exits)],
        f"Raise the limit: {more_memory}. Or launch a new run with a smaller trainer.micro_batch_size.",
    )


def _doubled(quantity: str) -> str:
    number = quantity.rstrip("mkMGTPi")
    return f"{float(number) * 2:g}{quantity[len(number) :]}"


def evicted(snapshot: Snapshot) -> Diagnosis | None:
    return _disrupted(snapshot, is_preempted=False)


def preempted(snapshot: Snapshot) -> Diagnosis | None:
    return _disrupted(snapshot, is_preempted=True)


def _disrupted(snapshot: Snapshot, is_preempted: bool) -> Diagnosis | None:
    """From exited pods, from terminating pods or, for deleted pods, from events."""
    if snapshot.status.state not in ("failed", "restarting", "pending", "starting"):
        return None
    for each in snapshot.exits:
        reason = each.disruption or each.pod_reason
        if reason and (reason in _PREEMPTION_REASONS) == is_preempted:
            message = each.pod_message or each.disruption_message
            return _disruption(snapshot, each.pod, each.node, reason, message, [each.text])
    for pod, raw in snapshot.pods:
        condition = find_condition(raw, "DisruptionTarget") or {}
        is_match = (condition.get("reason") in _PREEMPTION_REASONS) == is_preempted
        if pod.phase == "Terminating" and condition and is_match:
            evidence = [f"{pod_label(pod.index, pod.name)} is still terminating."]
            message = str(condition.get("message") or "")
            return _disruption(snapshot, pod.name, pod.node or "", str(condition.get("reason")), message, evidence)
    return _disrupted_by_events(snapshot, is_preempted)


def _disrupted_by_events(snapshot: Snapshot, is_preempted: bool) -> Diagnosis | None:
    if any(each.code not in (75, 143) for each in snapshot.exits):  # another exit is the cause
        return None
    reasons = ("Preempted",) if is_preempted else ("Evicted", "TaintManagerEviction")
    for event in snapshot.events_with_reason(*reasons):
        message, involved = str(event.get("message", "")), event["involvedObject"]
        is_over = message.startswith("Cancelling") or seconds_since(event_time(event)) > MAX_EVENT_AGE_SEC
        if involved.get("kind") == "Pod" and not is_over:
            return _disruption(snapshot, involved["name"], "", event["reason"], message, [])
    return None


def _disruption(snapshot: Snapshot, pod: str, node: str, reason: str, message: str, evidence: list[str]) -> Diagnosis:
    text = _DISRUPTIONS.get(reason, f"terminated by the cluster ({reason})")
    remedy = "The run resumes from its newest checkpoint as soon as its pods can be scheduled"
    if snapshot.status.state == "failed":
        remedy = f"Resume the run: {resume_command(snapshot)}"
    if "reempt" in reason:
        field = "launch.priority_class"
    elif "low on resource" in message:
        field = "launch.resources"
    else:
        field = "launch.pod_disruption_budget"
    return Diagnosis(
        f"{pod}{f' on {node}' if node else ''} was {text}{f': {redacted_line(message)}' if message else '.'}",
        [f"{pod}: {reason}: {redacted_line(message)}", *evidence],
        f"{remedy}. Set {field} to make this less likely.",
    )


def killed(snapshot: Snapshot) -> Diagnosis | None:
    """Exit code 137 without OOMKilled. A hung rank is killed too, after other ranks have reported it."""
    exit_ = exit_with_code(snapshot, 137)
    if exit_ is None or _was_reported_hung(snapshot, exit_):
        return None
    reason = "the cluster does not report that it ran out of memory"
    if exit_.is_pod_deleted:
        reason = "its pod was deleted, so it is unknown whether it ran out of memory"
    memory = snapshot.record.config.launch.resources.memory
    more_memory = resume_command(snapshot, f"launch.resources.memory={_doubled(memory)}")
    return Diagnosis(
        f"{exit_.label} was killed (SIGKILL); {reason}.",
        [
            *exit_evidence(snapshot, exit_, last_line(exit_.lines)),
            f"Its memory limit is {memory} (launch.resources.memory).",
        ],
        f"It most likely ran out of memory. Raise the limit: {more_memory}. Otherwise check who killed it: see the "
        f"kubelet log of {f'node {exit_.node}' if exit_.node else 'its node'}. {restart_note(snapshot)}",
    )


def _was_reported_hung(snapshot: Snapshot, killed_exit: ContainerExit) -> bool:
    return any(
        each.report and each.report.silent_ranks and each.finished_at and each.finished_at <= killed_exit.finished_at
        for each in snapshot.exits
    )


def crash(snapshot: Snapshot) -> Diagnosis | None:
    exit_ = next((each for each in snapshot.exits if each.code not in _CODES_OF_OTHER_CAUSES), None)
    if exit_ is None:
        return None
    message = (
        traceback_end(exit_.lines) or report_message(exit_) or redacted_line(exit_.message) or last_line(exit_.lines)
    )
    rank = exit_.index * snapshot.status.processes_per_node
    return Diagnosis(
        f"{exit_.label} crashed with exit code {exit_.code}{f': {message}' if message else '.'}",
        exit_evidence(snapshot, exit_, message),
        f"Check the log: llmtrain logs {snapshot.run} --rank {rank}. {restart_note(snapshot)}",
    )


def master_unreachable(snapshot: Snapshot) -> Diagnosis | None:
    exits = [each for each in snapshot.exits if each.code == UNREACHABLE and _reason(each) == "master_unreachable"]
    # A process that could not connect to the master has the most precise message.
    exit_ = next(iter(exits), None) or exit_with_code(snapshot, UNREACHABLE)
    if exit_ is None:
        return None
    if snapshot.has_service is False:
        return _service_deleted(snapshot, exit_)
    message = report_message(exit_)
    pod0 = next((pod for pod, _ in snapshot.pods if pod.index == 0), None)
    what = "The processes did not connect to each other in time"
    if _reason(exit_) == "master_unreachable":
        is_up = pod0 is not None and pod0.is_running
        what = "The master (pod 0) is running but cannot be reached" if is_up else "The master (pod 0) did not start"
    elif _reason(exit_) == "processes_missing":
        what = "Some processes did not join the run"
    elif exit_.report and exit_.report.error != "JoinError":
        what = "A required service could not be reached"
    remedy = f"{exit_.report.remedy} " if exit_.report and exit_.report.remedy else ""
    pod0_text = f"Pod 0: {f'{pod0.name}, {pod0.phase}' if pod0 else 'does not exist'}."
    return Diagnosis(
        f"{what}{f': {message}' if message else '.'}",
        [*exit_evidence(snapshot, exit_, message), pod0_text],
        f"Check the log of pod 0: llmtrain logs {snapshot.run} --rank 0. {remedy}{restart_note(snapshot)}",
    )


def _reason(exit_: ContainerExit) -> str | None:
    return exit_.report.reason if exit_.report else None


def _service_deleted(snapshot: Snapshot, exit_: ContainerExit) -> Diagnosis:
    name = snapshot.record.plan.service
    return Diagnosis(
        f"The Service {name} was deleted: without it, pods cannot resolve the address of the master (pod 0).",
        [f"Service {name}: not found.", *exit_evidence(snapshot, exit_, report_message(exit_))],
        f"Restarting pods will not help. Recreate the Service: {resume_command(snapshot)}.",
    )


def rank_hung(snapshot: Snapshot) -> Diagnosis | None:
    """Reported by the watchdog of another rank."""
    exit_ = next((each for each in snapshot.exits if _reason(each) == "no_progress"), None)
    if exit_ is None or exit_.report is None:
        return None
    ranks, message = list(exit_.report.silent_ranks), exit_.report.message
    what = f"Rank {', '.join(map(str, ranks))} hung" if ranks else "No rank makes progress: they wait for each other"
    per_pod = snapshot.status.processes_per_node
    evidence = [f"Rank {rank} is in {_pod_text(snapshot, rank // per_pod)}." for rank in ranks[:MAX_NAMED]]
    hung = _pods_still_hung(snapshot, exit_, [rank // per_pod for rank in ranks])
    next_step = restart_note(snapshot)
    if hung:
        evidence += [f"{pod.name} is still running; the restarted pods wait for it." for pod in hung[:MAX_NAMED]]
        next_step = f"Replace the hung pod, or the run cannot continue: llmtrain recover {snapshot.run}."
    return Diagnosis(
        f"{what}: {message}",
        [*exit_evidence(snapshot, exit_, message), *evidence],
        f"Check its log: llmtrain logs {snapshot.run} --rank {ranks[0] if ranks else 0}. {next_step}",
        tuple(pod.name for pod in hung),
    )


def _pods_still_hung(snapshot: Snapshot, exit_: ContainerExit, indexes: list[int]) -> list[PodStatus]:
    """Pods that have been running since before the watchdog's exit: no platform restarts a hung process."""
    pods = []
    for pod, raw in snapshot.pods if snapshot.is_active else ():
        running = container_state(raw, snapshot.record.workload.container)[0].get("running") or {}
        if pod.index in indexes and pod.is_running and running.get("startedAt", "9") < exit_.finished_at:
            pods.append(pod)
    return pods


def interrupted(snapshot: Snapshot) -> Diagnosis | None:
    """SIGTERM without a reason from the cluster: a deleted pod, for example."""
    exit_ = next((each for each in snapshot.exits if _is_interrupted(each)), None)
    if exit_ is not None:
        message = report_message(exit_)
        return Diagnosis(
            f"{exit_.label} was interrupted (SIGTERM){f': {message}' if message else '.'}",
            exit_evidence(snapshot, exit_, message),
            restart_note(snapshot),
        )
    pod = next((pod for pod, _ in snapshot.pods if pod.phase == "Terminating" and snapshot.is_active), None)
    if pod is None:
        return None
    return Diagnosis(
        f"{pod_label(pod.index, pod.name)} was deleted and is terminating{f' on {pod.node}' if pod.node else ''}.",
        [f"{pod.name} is Terminating, without a DisruptionTarget condition: it was deleted by a user or controller."],
        restart_note(snapshot),
    )


def _is_interrupted(exit_: ContainerExit) -> bool:
    if exit_.code != 75:
        return exit_.code == 143
    if exit_.report and exit_.report.error:
        return exit_.report.error == "Interrupted"
    return any("SIGTERM" in line for line in exit_.lines[-3:])


def peer_lost(snapshot: Snapshot) -> Diagnosis | None:
    """Exit code 75 for no other reason: a peer left no trace, or logs cannot be read."""
    exit_ = exit_with_code(snapshot, 75)
    if exit_ is None:
        return None
    message = report_message(exit_)
    return Diagnosis(
        f"A process of the run exited for an unknown reason: {message}" if message else exit_code_text(exit_),
        exit_evidence(snapshot, exit_, message),
        f"Its pod was probably deleted, together with its status and log. {restart_note(snapshot)}",
    )


def _pod_text(snapshot: Snapshot, index: int) -> str:
    pod = next((pod for pod, _ in snapshot.pods if pod.index == index), None)
    if pod is None:
        return f"pod {index}, which does not exist"
    return f"pod {index} ({pod.name}){f' on {pod.node}' if pod.node else ''}"
