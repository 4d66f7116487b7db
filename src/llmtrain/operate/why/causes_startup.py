"""Causes that keep pods from being created, scheduled or started, as reported by the cluster."""

import re
from collections import Counter

from llmtrain.kubernetes.api_errors import QUOTA_REMEDY
from llmtrain.kubernetes.client import Object
from llmtrain.operate.status.container_exits import pod_label
from llmtrain.operate.status.events import event_time, refusal
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
from llmtrain.redact import redacted_line
from llmtrain.text import plural

_MISSING_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_VOLUME_WORDS = ("persistentvolume", "volume node affinity", "volume zone", "volume limits", "max volume count")
_MISSING_SECRET = re.compile(r'secret "([^"]+)" not found')
_CONFIG_WORDS = re.compile(r"(?i)(secret|configmap) \S+ not found|(references )?non-existent (secret|config) key")
_EVENTS_AFTER_MOUNT = ("Pulling", "Pulled", "Created", "Started")
_TAINT_MANAGER = "DeletionByTaintManager"


def node_lost(snapshot: Snapshot) -> Diagnosis | None:
    """From the pods alone: reading nodes needs cluster-wide rights."""
    if not snapshot.is_active and snapshot.status.state != "stopping":
        return None
    lost = [(pod, sign) for pod, raw in snapshot.pods if (sign := _lost_node_sign(snapshot, pod, raw))]
    if not lost:
        return None
    nodes = list(dict.fromkeys(pod.node or "A node" for pod, _ in lost))
    remedy = (
        f"Move the run to other nodes: llmtrain recover {snapshot.run}. It also resumes when the node is Ready again."
    )
    if snapshot.status.state == "stopping":
        remedy = (
            f"The run can be resumed anyway: llmtrain resume {snapshot.run}. The pod is removed when the node is Ready "
            "again."
        )
    return Diagnosis(
        f"{', '.join(nodes[:MAX_LISTED])} {'is' if len(nodes) == 1 else 'are'} NotReady: {plural(len(lost), 'pod')} of "
        f"{snapshot.expected_pods} can neither run nor terminate there, and no pod replaces "
        f"{'it' if len(lost) == 1 else 'them'}.",
        [
            f"{pod_label(pod.index, pod.name)} on {pod.node or 'an unknown node'}: {sign}"
            for pod, sign in lost[:MAX_LISTED]
        ],
        remedy,
    )


def _lost_node_sign(snapshot: Snapshot, pod: PodStatus, raw: Object) -> str | None:
    if pod.phase in ("Succeeded", "Failed") or pod.exit_code is not None:
        return None
    if pod.is_overdue:
        return None if snapshot.is_running else "its deletion is overdue, and its node has not confirmed it."
    if pod.phase == "Unknown" or pod.reason == "NodeLost":
        return f"its state is unknown{f' ({redacted_line(pod.message)})' if pod.message else ''}."
    disruption = find_condition(raw, "DisruptionTarget") or {}
    if pod.phase == "Terminating" and disruption.get("reason") == _TAINT_MANAGER and node_not_ready_condition(raw):
        return f"its node is NotReady, and it is being deleted ({redacted_line(disruption.get('message'))})."
    if pod.phase == "Running" and node_not_ready_condition(raw):
        return "its container was running when its node became NotReady."
    return None


def image_pull(snapshot: Snapshot) -> Diagnosis | None:
    pods = _pods_waiting_for(snapshot, IMAGE_REASONS)
    if not pods:
        return None
    error = image_error(snapshot.record, pods[0])
    option = "" if pods[0].reason == "ErrImageNeverPull" else " --image IMAGE"
    return Diagnosis(
        error.what, _waiting_evidence(snapshot, pods), f"{error.remedy} Then: {resume_command(snapshot)}{option}."
    )


def container_config(snapshot: Snapshot) -> Diagnosis | None:
    """A missing Secret, key or ConfigMap: from the pod's status or, for mounts, from an event."""
    next_step = (
        f"Pods start automatically once it exists. To change the config: {resume_command(snapshot, 'FIELD=VALUE')}."
    )
    if pods := _pods_waiting_for(snapshot, CONFIG_REASONS):
        what = config_error(snapshot.record, pods[0], snapshot.place).what
        remedy = f"{_create_secret_remedy(snapshot, what)} {next_step}"
        return Diagnosis(what, _waiting_evidence(snapshot, pods), remedy)
    for pod, message in _mount_failures(snapshot) if snapshot.is_waiting else ():
        if _CONFIG_WORDS.search(message):
            what = f"Cannot create the container of {pod.name}: {message}"
            return Diagnosis(what, [f"Event FailedMount of {pod.name}: {message}"], f"Create it. {next_step}")
    return None


def _create_secret_remedy(snapshot: Snapshot, message: str) -> str:
    """The command that creates the missing Secret; it never contains the token."""
    token = snapshot.record.config.launch.hf_token_secret
    missing = _MISSING_SECRET.search(message)
    name = missing[1] if missing else ""
    if token.name and (name == token.name or (not missing and "secret" in message.lower() and token.name in message)):
        options = f" --name {token.name}" if token.name != "hf-token" else ""
        options += f" --key {token.key}" if token.key != "token" else ""
        command = f"llmtrain secret hf-token --from-env-file .env{options}{snapshot.place}"
        return f"Create it: {command}. Or correct launch.hf_token_secret."
    if missing:
        command = f"kubectl create secret generic {name}{snapshot.place} --from-env-file FILE"
        return f"Create it: {command}. Or correct launch.env_secrets."
    return "Create it, or correct the launch section."


def _pods_waiting_for(snapshot: Snapshot, reasons: tuple[str, ...]) -> list[PodStatus]:
    return [pod for pod, _ in snapshot.pods if pod.reason in reasons and snapshot.is_waiting]


def _waiting_evidence(snapshot: Snapshot, pods: list[PodStatus]) -> list[str]:
    lines = [_pod_line(pod, f"{pod.reason}: {pod.message or ''}".rstrip(": ")) for pod in pods[:MAX_LISTED]]
    return [*lines, f"{len(pods)} of {snapshot.expected_pods} pods are affected."]


def _pod_line(pod: PodStatus, text: str | None) -> str:
    return f"{pod_label(pod.index, pod.name)}: {text}"


def claim(snapshot: Snapshot) -> Diagnosis | None:
    """A claim that does not exist or is not bound, or a volume that cannot be mounted."""
    pods = _not_started(snapshot)
    if not pods or not snapshot.is_waiting:
        return None
    affected = [pod for pod in pods if any(word in (pod.message or "").lower() for word in _VOLUME_WORDS)]
    missing = [name for name, phase in snapshot.claims.items() if phase == "missing"]
    missing += [match[1] for pod in affected if (match := _MISSING_CLAIM.search(pod.message or ""))]
    unbound = [name for name, phase in snapshot.claims.items() if phase in ("Pending", "Lost")]
    failures = [(pod, message) for pod, message in _mount_failures(snapshot) if not _CONFIG_WORDS.search(message)]
    evidence = _claim_evidence(snapshot, affected, failures)
    if missing:
        remedy = _missing_claim_remedy(snapshot, missing[0])
        return Diagnosis(f"The claim {missing[0]} does not exist.", [*evidence, *_phases(snapshot)], remedy)
    if not evidence:
        return None
    if unbound:
        what = f"The claim {unbound[0]} is not bound to a volume."
        remedy = (
            f"Check that the storage class ({_claim_field(snapshot, unbound[0])}) exists and supports the access mode."
        )
    else:
        what = f"A volume cannot be mounted: {failures[0][1] if failures else evidence[0]}"
        remedy = "Check the claim and its storage class; several nodes need ReadWriteMany."
    return Diagnosis(what, [*evidence, *_phases(snapshot)], f"{remedy} Then: {resume_command(snapshot)}.")


def _claim_evidence(snapshot: Snapshot, affected: list[PodStatus], failures: list[tuple[PodStatus, str]]) -> list[str]:
    return [
        *(_pod_line(pod, pod.message) for pod in affected[:4]),
        *(f"Event FailedMount of {pod.name}: {message}" for pod, message in failures[:4]),
        *(
            f"Event {event['reason']} of claim {event['involvedObject']['name']}: "
            f"{redacted_line(event.get('message', ''))}"
            for event in snapshot.events_with_reason("ProvisioningFailed", "FailedBinding")[:2]
        ),
    ]


def _missing_claim_remedy(snapshot: Snapshot, name: str) -> str:
    field = _claim_field(snapshot, name)
    if field.endswith(".claim"):
        other = resume_command(snapshot, f"{field}=NAME")
        return f"Create it: pods then start automatically. Or set another claim: {other}."
    return f"It was created for the run and has been deleted. Recreate it, empty: {resume_command(snapshot)}."


def _phases(snapshot: Snapshot) -> list[str]:
    return [f"Claim {name}: {phase or 'unknown'}." for name, phase in snapshot.claims.items()]


def _claim_field(snapshot: Snapshot, name: str) -> str:
    """The config field behind a claim."""
    volumes = snapshot.record.config.launch.volumes
    volume = next((volume for volume, own in claim_names(snapshot.record).items() if own == name), "runs")
    has_claim = volume in volumes and volumes[volume].claim
    return f"launch.{volume}_volume.{'claim' if has_claim else 'storage_class'}"


def _not_started(snapshot: Snapshot) -> list[PodStatus]:
    """Pods in which no container has started yet."""
    return [pod for pod, raw in snapshot.pods if pod.phase == "Pending" and not _has_started(raw)]


def _has_started(raw: Object) -> bool:
    containers = (raw.get("status") or {}).get("initContainerStatuses") or []
    return any(state in (each.get("state") or {}) for each in containers for state in ("running", "terminated"))


def _mount_failures(snapshot: Snapshot) -> list[tuple[PodStatus, str]]:
    """Of pods that still wait for the mount: an event outlives its problem, and a first mount may fail once."""
    pods = {pod.name: pod for pod in _not_started(snapshot)}
    later = reversed(snapshot.events_with_reason(*_EVENTS_AFTER_MOUNT))
    mounted_at = {_involved_name(event): event_time(event) for event in later}
    failures = []
    for event in snapshot.events_with_reason("FailedMount", "FailedAttachVolume"):
        name, message = _involved_name(event), redacted_line(event.get("message", ""))
        if name in pods and event_time(event) > mounted_at.get(name, "") and "failed to sync" not in message:
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
        f"{QUOTA_REMEDY} Pods are created as soon as the quota allows it. To change the run: "
        f"{resume_command(snapshot, 'FIELD=VALUE')}.",
    )


def admission_refused(snapshot: Snapshot) -> Diagnosis | None:
    """By Pod Security or another admission policy."""
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
    if snapshot.job is None or not snapshot.is_waiting or len(snapshot.pods) >= snapshot.expected_pods:
        return None
    created = snapshot.events_with_reason("SuccessfulCreate", "SuccessfulCreatePod")
    since = max(map(event_time, created), default="")
    return refusal(snapshot.record, snapshot.job, [event for event in snapshot.events if event_time(event) >= since])


def _pod_count(snapshot: Snapshot) -> str:
    return f"{len(snapshot.pods)} of {snapshot.expected_pods} pods exist."


def unschedulable(snapshot: Snapshot) -> Diagnosis | None:
    pods = [pod for pod, _ in snapshot.pods if pod.reason == "Unschedulable"]
    if not pods or not snapshot.is_waiting:
        return None
    message = Counter(pod.message or "" for pod in pods).most_common(1)[0][0]
    parsed = parse_unschedulable(message)
    evidence = [_pod_line(pod, pod.message) for pod in pods[:3]]
    evidence += [f"... and {len(pods) - 3} more."] if len(pods) > 3 else []
    evidence.append(f"{len(snapshot.pods) - len(pods)} of {snapshot.expected_pods} pods are scheduled.")
    reasons = _unschedulable_reasons(snapshot, parsed) or message
    what = f"{len(pods)} of {snapshot.expected_pods} pods cannot be scheduled. {reasons}".strip()
    return Diagnosis(what, evidence, _unschedulable_remedy(snapshot, parsed))


def _unschedulable_reasons(snapshot: Snapshot, parsed: Unschedulable) -> str:
    resources = snapshot.record.config.launch.resources
    requests = {"cpu": resources.cpu, "memory": resources.memory, resources.gpu_resource: str(resources.gpus)}
    insufficient = ", ".join(
        f"{name}{f' (each pod requests {requests[name]})' if name in requests else ''} on {count} of {parsed.nodes} "
        "nodes"
        for name, count in parsed.insufficient.items()
    )
    others = "; ".join(
        f"{count} {reason}" for count, reason in parsed.reasons if not reason.startswith("Insufficient ")
    )
    return " ".join(f"{part}." for part in (f"Insufficient {insufficient}" if insufficient else "", others) if part)


def _unschedulable_remedy(snapshot: Snapshot, parsed: Unschedulable) -> str:
    resources = snapshot.record.config.launch.resources
    names = {"cpu": "cpu", "memory": "memory", resources.gpu_resource: "gpus"}
    fields = [f"launch.resources.{names[name]}" for name in parsed.insufficient if name in names]
    # Each process uses one GPU.
    fields += ["launch.processes_per_node"] if resources.gpu_resource in parsed.insufficient else []
    fields += ["launch.nodes"] if parsed.insufficient else []
    fields += parsed.fields
    change = f"Change {', '.join(fields)}: {resume_command(snapshot, 'FIELD=VALUE')}." if fields else ""
    return f"{change} Pods start automatically when a node has capacity.".strip()
