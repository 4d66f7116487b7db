"""Causes of container exits: exit codes, disruptions by the cluster, and error messages."""

from llmtrain.core.redact import redacted_line
from llmtrain.errors import ExitCode
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
    last_line,
    other_exits,
    report_message,
    restart_note,
    resume_command,
    traceback_end,
    with_message,
    with_node,
)
from llmtrain.operate.why.snapshot import Snapshot
from llmtrain.runs.state import RunState

MAX_EVENT_AGE_SEC = 900.0  # older events are not related to the current state
MAX_NAMED = 4  # pods, exits or ranks with an evidence line of their own
_PREEMPTION_REASONS = ("PreemptionByScheduler", "Preempting", "Preempted")
_CODES_OF_OTHER_CAUSES = (
    ExitCode.FINISHED,
    ExitCode.USAGE,
    ExitCode.FAILED,
    ExitCode.UNAVAILABLE,
    ExitCode.INTERRUPTED,
    ExitCode.KILLED,
    ExitCode.TERMINATED,
)
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
    evidence = [each.text for each in exits[:MAX_NAMED]]
    for pod, memory in list(snapshot.usage.items())[:MAX_NAMED]:
        evidence.append(f"{pod} uses {memory_text(memory)} of {resources.memory} now.")
    return Diagnosis(
        f"{exits[0].label} ran out of memory: its limit is {resources.memory} (launch.resources.memory), "
        f"of which up to {resources.shm_size} is shared memory.",
        evidence + other_exits(snapshot, exits),
        f"Raise the limit: {_command_with_more_memory(snapshot)}. Or launch a new run with a smaller "
        "trainer.micro_batch_size.",
    )


def _command_with_more_memory(snapshot: Snapshot) -> str:
    """The command that resumes the run with twice its memory limit."""
    limit = snapshot.record.config.launch.resources.memory
    number = limit.rstrip("mkMGTPi")
    unit = limit.removeprefix(number)
    return resume_command(snapshot, f"launch.resources.memory={float(number) * 2:g}{unit}")


def evicted(snapshot: Snapshot) -> Diagnosis | None:
    return _disrupted(snapshot, is_preempted=False)


def preempted(snapshot: Snapshot) -> Diagnosis | None:
    return _disrupted(snapshot, is_preempted=True)


def _disrupted(snapshot: Snapshot, is_preempted: bool) -> Diagnosis | None:
    """From exited pods, from terminating pods or, for deleted pods, from events."""
    for each in snapshot.exits:
        reason = each.disruption or each.pod_reason
        if reason and (reason in _PREEMPTION_REASONS) == is_preempted:
            message = each.pod_message or each.disruption_message
            return _disruption(snapshot, each.pod, each.node, reason, message, [each.text])
    for pod, raw in snapshot.pods:
        condition = find_condition(raw, "DisruptionTarget")
        if pod.phase != "Terminating" or not condition:
            continue
        reason = str(condition.get("reason"))
        if (reason in _PREEMPTION_REASONS) == is_preempted:
            message = str(condition.get("message") or "")
            evidence = [f"{pod_label(pod.index, pod.name)} is still terminating."]
            return _disruption(snapshot, pod.name, pod.node, reason, message, evidence)
    return _disrupted_by_events(snapshot, is_preempted)


def _disrupted_by_events(snapshot: Snapshot, is_preempted: bool) -> Diagnosis | None:
    if any(each.code not in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) for each in snapshot.exits):
        return None  # another exit is the cause
    reasons = ("Preempted",) if is_preempted else ("Evicted", "TaintManagerEviction")
    for event in snapshot.events_with_reason(*reasons):
        message = str(event.get("message", ""))
        involved = event["involvedObject"]
        is_canceled = message.startswith("Cancelling")  # "Cancelling deletion of Pod": the taint was removed in time
        is_old = seconds_since(event_time(event)) > MAX_EVENT_AGE_SEC
        if involved.get("kind") == "Pod" and not is_canceled and not is_old:
            return _disruption(snapshot, involved["name"], "", event["reason"], message, [])
    return None


def _disruption(
    snapshot: Snapshot, pod: str, node: str | None, reason: str, message: str, evidence: list[str]
) -> Diagnosis:
    text = _DISRUPTIONS.get(reason, f"terminated by the cluster ({reason})")
    remedy = "The run resumes from its newest checkpoint as soon as its pods can be scheduled"
    if snapshot.status.state == RunState.FAILED:
        remedy = f"Resume the run: {resume_command(snapshot)}"
    if "reempt" in reason:
        field = "launch.priority_class"
    elif "low on resource" in message:
        field = "launch.resources"
    else:
        field = "launch.pod_disruption_budget"
    message = redacted_line(message)
    return Diagnosis(
        with_message(f"{with_node(pod, node)} was {text}", message),
        [f"{pod}: {reason}: {message}", *evidence],
        f"{remedy}. Set {field} to make this less likely.",
    )


def killed(snapshot: Snapshot) -> Diagnosis | None:
    """Exit code 137 without OOMKilled. A hung rank is killed too, after other ranks have reported it."""
    exit_ = exit_with_code(snapshot, ExitCode.KILLED)
    if exit_ is None or _was_reported_hung(snapshot, exit_):
        return None
    reason = "the cluster does not report that it ran out of memory"
    if exit_.is_pod_deleted:
        reason = "its pod was deleted, so it is unknown whether it ran out of memory"
    memory = snapshot.record.config.launch.resources.memory
    evidence = exit_evidence(snapshot, exit_, last_line(exit_.lines))
    evidence.append(f"Its memory limit is {memory} (launch.resources.memory).")
    node = f"node {exit_.node}" if exit_.node else "its node"
    return Diagnosis(
        f"{exit_.label} was killed (SIGKILL); {reason}.",
        evidence,
        f"It most likely ran out of memory. Raise the limit: {_command_with_more_memory(snapshot)}. Otherwise check "
        f"who killed it: see the kubelet log of {node}. {restart_note(snapshot)}",
    )


def _was_reported_hung(snapshot: Snapshot, killed_exit: ContainerExit) -> bool:
    for each in snapshot.exits:
        has_silent_ranks = each.report and each.report.silent_ranks
        if has_silent_ranks and each.finished_at and each.finished_at <= killed_exit.finished_at:
            return True
    return False


def crash(snapshot: Snapshot) -> Diagnosis | None:
    crashes = [each for each in snapshot.exits if each.code not in _CODES_OF_OTHER_CAUSES]
    if not crashes:
        return None
    exit_ = crashes[0]  # the first one: peers fail after it
    message = (
        traceback_end(exit_.lines) or report_message(exit_) or redacted_line(exit_.message) or last_line(exit_.lines)
    )
    rank = exit_.index * snapshot.status.processes_per_node
    return Diagnosis(
        with_message(f"{exit_.label} crashed with exit code {exit_.code}", message),
        exit_evidence(snapshot, exit_, message),
        f"Check the log: llmtrain logs {snapshot.run} --rank {rank}. {restart_note(snapshot)}",
    )


def master_unreachable(snapshot: Snapshot) -> Diagnosis | None:
    exit_ = exit_with_code(snapshot, ExitCode.UNAVAILABLE)
    for each in snapshot.exits:  # a process that could not connect to the master has the most precise message
        if each.code == ExitCode.UNAVAILABLE and _reason(each) == "master_unreachable":
            exit_ = each
            break
    if exit_ is None:
        return None
    if snapshot.has_service is False:
        return _service_deleted(snapshot, exit_)
    message = report_message(exit_)
    pod0 = _pod_at(snapshot, 0)
    evidence = exit_evidence(snapshot, exit_, message)
    if pod0 is None:
        evidence.append("Pod 0: does not exist.")
    else:
        evidence.append(f"Pod 0: {pod0.name}, {pod0.phase}.")
    remedy = f"Check the log of pod 0: llmtrain logs {snapshot.run} --rank 0."
    if exit_.report and exit_.report.remedy:
        remedy += f" {exit_.report.remedy}"
    what = with_message(_not_joined(exit_, pod0), message)
    return Diagnosis(what, evidence, f"{remedy} {restart_note(snapshot)}")


def _not_joined(exit_: ContainerExit, pod0: PodStatus | None) -> str:
    if _reason(exit_) == "master_unreachable":
        if pod0 is not None and pod0.is_running:
            return "The master (pod 0) is running but cannot be reached"
        return "The master (pod 0) did not start"
    if _reason(exit_) == "processes_missing":
        return "Some processes did not join the run"
    if exit_.report and exit_.report.error != "JoinError":
        return "A required service could not be reached"
    return "The processes did not connect to each other in time"


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
    message = exit_.report.message
    evidence = exit_evidence(snapshot, exit_, message)
    per_pod = snapshot.status.processes_per_node
    ranks = exit_.report.silent_ranks
    for rank in ranks[:MAX_NAMED]:
        evidence.append(f"Rank {rank} is in {_pod_text(snapshot, rank // per_pod)}.")
    hung = _pods_still_hung(snapshot, exit_, {rank // per_pod for rank in ranks})
    for pod in hung[:MAX_NAMED]:
        evidence.append(f"{pod.name} is still running; the restarted pods wait for it.")
    next_step = restart_note(snapshot)
    if hung:
        next_step = f"Replace the hung pod, or the run cannot continue: llmtrain recover {snapshot.run}."
    what = "No rank makes progress: they wait for each other"
    rank = 0
    if ranks:
        what = f"Rank {', '.join(map(str, ranks))} hung"
        rank = ranks[0]
    return Diagnosis(
        f"{what}: {message}",
        evidence,
        f"Check its log: llmtrain logs {snapshot.run} --rank {rank}. {next_step}",
        tuple(pod.name for pod in hung),
    )


def _pods_still_hung(snapshot: Snapshot, exit_: ContainerExit, indexes: set[int]) -> list[PodStatus]:
    """Pods that have been running since before the watchdog's exit: no platform restarts a hung process."""
    if not snapshot.is_active:
        return []
    pods = []
    for pod, raw in snapshot.pods:
        running = container_state(raw, snapshot.record.kind.container)[0].get("running") or {}
        if pod.index in indexes and pod.is_running and running.get("startedAt", "9") < exit_.finished_at:
            pods.append(pod)
    return pods


def interrupted(snapshot: Snapshot) -> Diagnosis | None:
    """SIGTERM without a reason from the cluster: a deleted pod, for example."""
    exit_ = next((each for each in snapshot.exits if _is_interrupted(each)), None)
    if exit_ is not None:
        message = report_message(exit_)
        what = with_message(f"{exit_.label} was interrupted (SIGTERM)", message)
        return Diagnosis(what, exit_evidence(snapshot, exit_, message), restart_note(snapshot))
    pod = next((pod for pod, _ in snapshot.pods if pod.phase == "Terminating"), None)
    if pod is None or not snapshot.is_active:
        return None
    return Diagnosis(
        with_node(f"{pod_label(pod.index, pod.name)} was deleted and is terminating", pod.node) + ".",
        [f"{pod.name} is Terminating, without a DisruptionTarget condition: it was deleted by a user or controller."],
        restart_note(snapshot),
    )


def _is_interrupted(exit_: ContainerExit) -> bool:
    if exit_.code != ExitCode.INTERRUPTED:
        return exit_.code == ExitCode.TERMINATED
    if exit_.report and exit_.report.error:
        return exit_.report.error == "Interrupted"
    return any("SIGTERM" in line for line in exit_.lines[-3:])


def peer_lost(snapshot: Snapshot) -> Diagnosis | None:
    """Exit code 75 for no other reason: a peer left no trace, or logs cannot be read."""
    exit_ = exit_with_code(snapshot, ExitCode.INTERRUPTED)
    if exit_ is None:
        return None
    message = report_message(exit_)
    what = exit_code_text(exit_)
    if message:
        what = f"A process of the run exited for an unknown reason: {message}"
    return Diagnosis(
        what,
        exit_evidence(snapshot, exit_, message),
        f"Its pod was probably deleted, together with its status and log. {restart_note(snapshot)}",
    )


def _pod_text(snapshot: Snapshot, index: int) -> str:
    pod = _pod_at(snapshot, index)
    if pod is None:
        return f"pod {index}, which does not exist"
    return with_node(f"pod {index} ({pod.name})", pod.node)


def _pod_at(snapshot: Snapshot, index: int) -> PodStatus | None:
    return next((pod for pod, _ in snapshot.pods if pod.index == index), None)
