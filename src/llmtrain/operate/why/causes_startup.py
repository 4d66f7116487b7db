"""Causes that keep pods from being created, scheduled or started, as reported by the cluster."""

import re
from collections import Counter

from llmtrain.core.redact import redacted_line
from llmtrain.core.text import plural
from llmtrain.kubernetes.api_errors import quota_remedy
from llmtrain.kubernetes.client import Object
from llmtrain.operate.status.container_exits import pod_label
from llmtrain.operate.status.events import MISSING_OBJECT, event_time, refusal
from llmtrain.operate.status.lost_nodes import find_condition, node_not_ready_condition
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.scheduler import Unschedulable, parse_unschedulable
from llmtrain.operate.status.startup_failures import (
    CONFIG_REASONS,
    IMAGE_REASONS,
    config_error,
    image_error,
    refusal_error,
)
from llmtrain.operate.why.diagnosis import MAX_LISTED, Diagnosis, resume_command
from llmtrain.operate.why.snapshot import Snapshot, claim_names
from llmtrain.runs.state import RunState

_MISSING_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_VOLUME_WORDS = ("persistentvolume", "volume node affinity", "volume zone", "volume limits", "max volume count")
_MISSING_SECRET = re.compile(r'secret "([^"]+)" not found')
_EVENTS_AFTER_MOUNT = ("Pulling", "Pulled", "Created", "Started")
_TAINT_MANAGER = "DeletionByTaintManager"


def node_lost(snapshot: Snapshot) -> Diagnosis | None:
    """From the pods alone: reading nodes needs cluster-wide rights."""
    is_stopping = snapshot.status.state == RunState.STOPPING
    if not snapshot.is_active and not is_stopping:
        return None
    nodes: dict[str, None] = {}  # a set that keeps the order
    evidence = []
    for pod, raw in snapshot.pods:
        sign = _lost_node_sign(snapshot, pod, raw)
        if sign:
            nodes[pod.node or "A node"] = None
            evidence.append(f"{pod_label(pod.index, pod.name)} on {pod.node or 'an unknown node'}: {sign}")
    if not evidence:
        return None
    are = "is" if len(nodes) == 1 else "are"
    them = "it" if len(evidence) == 1 else "them"
    if is_stopping:
        remedy = (
            f"The run can be resumed anyway: llmtrain resume {snapshot.run}. The pod is removed when the node is Ready "
            "again."
        )
    else:
        recover = f"llmtrain recover {snapshot.run}"
        remedy = f"Move the run to other nodes: {recover}. It also resumes when the node is Ready again."
    return Diagnosis(
        f"{', '.join(list(nodes)[:MAX_LISTED])} {are} NotReady: {plural(len(evidence), 'pod')} of "
        f"{snapshot.expected_pods} can neither run nor terminate there, and no pod replaces {them}.",
        evidence[:MAX_LISTED],
        remedy,
    )


def _lost_node_sign(snapshot: Snapshot, pod: PodStatus, raw: Object) -> str | None:
    if pod.phase in ("Succeeded", "Failed") or pod.exit_code is not None:
        return None
    if pod.is_overdue:
        if snapshot.is_running:  # an elastic run that trains without it
            return None
        return "its deletion is overdue, and its node has not confirmed it."
    if pod.phase == "Unknown" or pod.reason == "NodeLost":
        sign = "its state is unknown"
        if pod.message:
            sign += f" ({redacted_line(pod.message)})"
        return f"{sign}."
    if not node_not_ready_condition(raw):
        return None
    disruption = find_condition(raw, "DisruptionTarget") or {}
    if pod.phase == "Terminating" and disruption.get("reason") == _TAINT_MANAGER:
        return f"its node is NotReady, and it is being deleted ({redacted_line(disruption.get('message'))})."
    if pod.phase == "Running":
        return "its container was running when its node became NotReady."
    return None


def image_pull(snapshot: Snapshot) -> Diagnosis | None:
    pods = _pods_waiting_for(snapshot, IMAGE_REASONS)
    if not pods:
        return None
    error = image_error(snapshot.record, pods[0])
    command = resume_command(snapshot)
    if pods[0].reason != "ErrImageNeverPull":
        command += " --image IMAGE"
    return Diagnosis(error.what, _waiting_evidence(snapshot, pods), f"{error.remedy} Then: {command}.")


def container_config(snapshot: Snapshot) -> Diagnosis | None:
    """A missing Secret, key or ConfigMap: from the pod's status or, for mounts, from an event."""
    next_step = (
        f"Pods start automatically once it exists. To change the config: {resume_command(snapshot, 'FIELD=VALUE')}."
    )
    if pods := _pods_waiting_for(snapshot, CONFIG_REASONS):
        what = config_error(snapshot.record, pods[0], snapshot.place).what
        remedy = f"{_create_secret_remedy(snapshot, what)} {next_step}"
        return Diagnosis(what, _waiting_evidence(snapshot, pods), remedy)
    for pod, message in _mount_failures(snapshot):
        if MISSING_OBJECT.search(message):
            what = f"Cannot create the container of {pod.name}: {message}"
            return Diagnosis(what, [f"Event FailedMount of {pod.name}: {message}"], f"Create it. {next_step}")
    return None


def _create_secret_remedy(snapshot: Snapshot, message: str) -> str:
    """The command that creates the missing Secret; it never contains the token."""
    token = snapshot.record.config.launch.hf_token_secret
    missing = _MISSING_SECRET.search(message)
    is_token = token.name and token.name in message and "secret" in message.lower()
    if missing:
        is_token = missing[1] == token.name
    if is_token:
        command = "llmtrain secret hf-token --from-env-file .env"
        if token.name != "hf-token":
            command += f" --name {token.name}"
        if token.key != "token":
            command += f" --key {token.key}"
        return f"Create it: {command}{snapshot.place}. Or correct launch.hf_token_secret."
    if missing:
        command = f"kubectl create secret generic {missing[1]}{snapshot.place} --from-env-file FILE"
        return f"Create it: {command}. Or correct launch.env_secrets."
    return "Create it, or correct the launch section."


def _pods_waiting_for(snapshot: Snapshot, reasons: tuple[str, ...]) -> list[PodStatus]:
    return [pod for pod, _ in snapshot.pods if pod.reason in reasons]


def _waiting_evidence(snapshot: Snapshot, pods: list[PodStatus]) -> list[str]:
    lines = []
    for pod in pods[:MAX_LISTED]:
        lines.append(_pod_line(pod, f"{pod.reason}: {pod.message or ''}".rstrip(": ")))
    lines.append(f"{len(pods)} of {snapshot.expected_pods} pods are affected.")
    return lines


def _pod_line(pod: PodStatus, text: str | None) -> str:
    return f"{pod_label(pod.index, pod.name)}: {text}"


def claim(snapshot: Snapshot) -> Diagnosis | None:
    """A claim that does not exist or is not bound, or a volume that cannot be mounted."""
    pods = _not_started(snapshot)
    if not pods:
        return None
    affected = [pod for pod in pods if _names_volume(pod)]
    # A missing Secret or ConfigMap is the cause `container_config`.
    failures = [(pod, message) for pod, message in _mount_failures(snapshot) if not MISSING_OBJECT.search(message)]
    evidence = _claim_evidence(snapshot, affected, failures)
    phases = [f"Claim {name}: {phase or 'unknown'}." for name, phase in snapshot.claims.items()]
    missing = _missing_claim(snapshot, affected)
    if missing:
        remedy = _missing_claim_remedy(snapshot, missing)
        return Diagnosis(f"The claim {missing} does not exist.", evidence + phases, remedy)
    if not evidence:
        return None
    unbound = _unbound_claim(snapshot)
    if unbound:
        what = f"The claim {unbound} is not bound to a volume."
        remedy = _unbound_claim_remedy(snapshot, unbound)
    else:
        message = failures[0][1] if failures else evidence[0]
        what = f"A volume cannot be mounted: {message}"
        remedy = "Check the claim and its storage class; several nodes need ReadWriteMany. "
        remedy += f"Then: {resume_command(snapshot)}."
    return Diagnosis(what, evidence + phases, remedy)


def _names_volume(pod: PodStatus) -> bool:
    """Whether the scheduler reports a problem with a volume of the pod."""
    message = (pod.message or "").lower()
    return any(word in message for word in _VOLUME_WORDS)


def _missing_claim(snapshot: Snapshot, affected: list[PodStatus]) -> str | None:
    """Claims may not be readable; then the scheduler's message names the missing one."""
    for name, phase in snapshot.claims.items():
        if phase == "missing":
            return name
    for pod in affected:
        if match := _MISSING_CLAIM.search(pod.message or ""):
            return match[1]
    return None


def _unbound_claim(snapshot: Snapshot) -> str | None:
    for name, phase in snapshot.claims.items():
        if phase in ("Pending", "Lost"):
            return name
    return None


def _claim_evidence(snapshot: Snapshot, affected: list[PodStatus], failures: list[tuple[PodStatus, str]]) -> list[str]:
    lines = [_pod_line(pod, pod.message) for pod in affected[:4]]
    for pod, message in failures[:4]:
        lines.append(f"Event FailedMount of {pod.name}: {message}")
    for event in snapshot.events_with_reason("ProvisioningFailed", "FailedBinding")[:2]:
        message = redacted_line(event.get("message", ""))
        lines.append(f"Event {event['reason']} of claim {_involved_name(event)}: {message}")
    return lines


def _unbound_claim_remedy(snapshot: Snapshot, name: str) -> str:
    """A claim that the launch has created cannot be changed, and is empty: no pod has started."""
    field = _claim_field(snapshot, name)
    if field.endswith(".claim"):
        check = "Check that its storage class exists and supports the access mode, or set another claim"
        return f"{check}: {resume_command(snapshot, f'{field}=NAME')}."
    section = field.rpartition(".")[0]
    other = resume_command(snapshot, f"{section}.claim=NAME")
    return (
        f"Check that the storage class ({field}) exists, supports the access mode and can provide {section}.size. "
        f"Then delete the run and its empty claim (llmtrain delete {snapshot.record.run_id}{snapshot.place} --data) "
        f"and launch it again, or use an existing claim: {other}."
    )


def _missing_claim_remedy(snapshot: Snapshot, name: str) -> str:
    field = _claim_field(snapshot, name)
    if field.endswith(".claim"):
        other = resume_command(snapshot, f"{field}=NAME")
        return f"Create it: pods then start automatically. Or set another claim: {other}."
    return f"It was created for the run and has been deleted. Recreate it, empty: {resume_command(snapshot)}."


def _claim_field(snapshot: Snapshot, name: str) -> str:
    """The config field behind a claim."""
    volume = "runs"
    for each, claim_name in claim_names(snapshot.record).items():
        if claim_name == name:
            volume = each
            break
    volumes = snapshot.record.config.launch.volumes
    if volume in volumes and volumes[volume].claim:  # it existed before the run
        return f"launch.{volume}_volume.claim"
    return f"launch.{volume}_volume.storage_class"


def _not_started(snapshot: Snapshot) -> list[PodStatus]:
    """Pods in which no container has started yet."""
    return [pod for pod, raw in snapshot.pods if pod.phase == "Pending" and not _has_started(raw)]


def _has_started(raw: Object) -> bool:
    for container in (raw.get("status") or {}).get("initContainerStatuses") or []:
        state = container.get("state") or {}
        if "running" in state or "terminated" in state:
            return True
    return False


def _mount_failures(snapshot: Snapshot) -> list[tuple[PodStatus, str]]:
    """Failed mounts of pods that still wait: an event outlives its problem, and a first mount may fail once."""
    pods = {pod.name: pod for pod in _not_started(snapshot)}
    mounted_at = {}
    for event in reversed(snapshot.events_with_reason(*_EVENTS_AFTER_MOUNT)):  # oldest first: the newest stays
        mounted_at[_involved_name(event)] = event_time(event)
    failures = []
    for event in snapshot.events_with_reason("FailedMount", "FailedAttachVolume"):
        name = _involved_name(event)
        message = redacted_line(event.get("message", ""))
        is_current = event_time(event) > mounted_at.get(name, "")
        # "failed to sync": the kubelet has not yet read the ConfigMap or Secret of a new pod, and tries again.
        if name in pods and is_current and "failed to sync" not in message:
            failures.append((pods[name], message))
    return failures


def _involved_name(event: Object) -> str:
    return str((event.get("involvedObject") or {}).get("name"))


def quota_exceeded(snapshot: Snapshot) -> Diagnosis | None:
    message = _current_refusal(snapshot)
    if not message or "exceeded quota" not in message:
        return None
    return Diagnosis(
        refusal_error(snapshot.record, message).what,
        [_pod_count(snapshot), redacted_line(message)],
        f"{quota_remedy(message)} Pods are created as soon as the quota allows it. To change the run: "
        f"{resume_command(snapshot, 'FIELD=VALUE')}.",
    )


def admission_refused(snapshot: Snapshot) -> Diagnosis | None:
    """Pods were refused by Pod Security or another admission policy."""
    message = _current_refusal(snapshot)
    if not message:
        return None
    error = refusal_error(snapshot.record, message)
    remedy = "Correct the launch section."
    if "serviceaccount" in message:
        remedy = "Create that service account."
    elif "violates PodSecurity" in message and error.remedy:
        remedy = error.remedy
    evidence = [_pod_count(snapshot), redacted_line(message)]
    return Diagnosis(error.what, evidence, f"{remedy} Then: {resume_command(snapshot)}.")


def _current_refusal(snapshot: Snapshot) -> str | None:
    """Message of a refusal since the last pod was created."""
    if snapshot.job is None or len(snapshot.pods) >= snapshot.expected_pods:
        return None
    created = snapshot.events_with_reason("SuccessfulCreate", "SuccessfulCreatePod")
    since = max(map(event_time, created), default="")
    newer = [event for event in snapshot.events if event_time(event) >= since]
    return refusal(snapshot.record, snapshot.job, newer)


def _pod_count(snapshot: Snapshot) -> str:
    return f"{len(snapshot.pods)} of {snapshot.expected_pods} pods exist."


def unschedulable(snapshot: Snapshot) -> Diagnosis | None:
    pods = [pod for pod, _ in snapshot.pods if pod.reason == "Unschedulable"]
    if not pods:
        return None
    # The scheduler looks at each pod at another moment: the message that most of them have describes the cluster best.
    message = Counter(pod.message or "" for pod in pods).most_common(1)[0][0]
    parsed = parse_unschedulable(message)
    evidence = [_pod_line(pod, pod.message) for pod in pods[:3]]
    if len(pods) > 3:
        evidence.append(f"... and {len(pods) - 3} more.")
    evidence.append(f"{len(snapshot.pods) - len(pods)} of {snapshot.expected_pods} pods are scheduled.")
    reasons = _unschedulable_reasons(snapshot, parsed) or message
    what = f"{len(pods)} of {snapshot.expected_pods} pods cannot be scheduled. {reasons}".strip()
    return Diagnosis(what, evidence, _unschedulable_remedy(snapshot, parsed))


def _unschedulable_reasons(snapshot: Snapshot, parsed: Unschedulable) -> str:
    resources = snapshot.record.config.launch.resources
    requests = {"cpu": resources.cpu, "memory": resources.memory, resources.gpu_resource: str(resources.gpus)}
    insufficient = []
    for name, count in parsed.insufficient.items():
        resource = name
        if name in requests:
            resource += f" (each pod requests {requests[name]})"
        insufficient.append(f"{resource} on {count} of {parsed.nodes} nodes")
    others = []
    for count, reason in parsed.reasons:
        if not reason.startswith("Insufficient "):
            others.append(f"{count} {reason}")
    sentences = []
    if insufficient:
        sentences.append(f"Insufficient {', '.join(insufficient)}.")
    if others:
        sentences.append(f"{'; '.join(others)}.")
    return " ".join(sentences)


def _unschedulable_remedy(snapshot: Snapshot, parsed: Unschedulable) -> str:
    resources = snapshot.record.config.launch.resources
    names = {"cpu": "cpu", "memory": "memory", resources.gpu_resource: "gpus"}
    fields = [f"launch.resources.{names[name]}" for name in parsed.insufficient if name in names]
    if resources.gpu_resource in parsed.insufficient:  # each process uses one GPU
        fields.append("launch.processes_per_node")
    if parsed.insufficient:
        fields.append("launch.nodes")
    fields += parsed.fields
    note = "Pods start automatically when a node has capacity."
    if not fields:
        return note
    return f"Change {', '.join(fields)}: {resume_command(snapshot, 'FIELD=VALUE')}. {note}"
