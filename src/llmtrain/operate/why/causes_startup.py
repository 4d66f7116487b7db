"""Why pods are not there, or do not start: what the cluster itself says of them."""

import re
from collections import Counter

from llmtrain.errors import UsageError
from llmtrain.kubernetes.api_errors import QUOTA_REMEDY, admission_error, one_line
from llmtrain.kubernetes.client import Object
from llmtrain.operate.status.events import event_time, refusal
from llmtrain.operate.status.lost_nodes import find_condition, node_not_ready_condition
from llmtrain.operate.status.pods import PodStatus
from llmtrain.operate.status.scheduler import Unschedulable, parse_unschedulable
from llmtrain.operate.status.startup_failures import CONFIG_REASONS, IMAGE_REASONS, config_error, image_error
from llmtrain.operate.why.diagnosis import Diagnosis, go_on
from llmtrain.operate.why.snapshot import Snapshot, claim_names
from llmtrain.text import plural

_NO_CLAIM = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_VOLUME_WORDS = ("persistentvolume", "volume node affinity", "volume zone", "volume limits", "max volume count")
_NO_SECRET = re.compile(r'secret "([^"]+)" not found')
_CONFIG_WORDS = re.compile(r"(?i)(secret|configmap) \S+ not found|(references )?non-existent (secret|config) key")
_PAST_MOUNTS = ("Pulling", "Pulled", "Created", "Started")
_TAINT_MANAGER = "DeletionByTaintManager"


def node_lost(snapshot: Snapshot) -> Diagnosis | None:
    """A machine that does not answer, told from the pod: not everybody may look at machines."""
    if not snapshot.is_active and snapshot.status.state != "stopping":
        return None
    lost = [(pod, sign) for pod, raw in snapshot.pods if (sign := _lost_sign(snapshot, pod, raw))]
    if not lost:
        return None
    machines = list(dict.fromkeys(pod.node or "its machine" for pod, _ in lost))
    remedy = (
        f"llmtrain recover {snapshot.run} lets the run go on elsewhere. It also goes on when the machine comes back."
    )
    if snapshot.status.state == "stopping":
        remedy = (
            f"It holds nothing up: llmtrain resume {snapshot.run} goes on. The pod goes when the machine comes back."
        )
    return Diagnosis(
        f"{', '.join(machines[:8])} {'is' if len(machines) == 1 else 'are'} lost: {plural(len(lost), 'pod')} of "
        f"{snapshot.wanted} can neither run nor end there, and nothing takes its place meanwhile.",
        [f"{pod.name} (node {pod.index}) on {pod.node or 'a machine'}: {sign}" for pod, sign in lost[:8]],
        remedy,
    )


def _lost_sign(snapshot: Snapshot, pod: PodStatus, raw: Object) -> str | None:
    if pod.phase in ("Succeeded", "Failed") or pod.exit_code is not None:
        return None
    if pod.is_overdue:
        return None if snapshot.is_running else "it should have ended by now, and its machine does not say that it has."
    if pod.phase == "Unknown" or pod.reason == "NodeLost":
        return f"its state is unknown{f' ({one_line(pod.message)})' if pod.message else ''}."
    disruption = find_condition(raw, "DisruptionTarget") or {}
    if pod.phase == "Terminating" and disruption.get("reason") == _TAINT_MANAGER and node_not_ready_condition(raw):
        return f"its machine has stopped answering, and it is to be removed ({one_line(disruption.get('message'))})."
    if pod.phase == "Running" and node_not_ready_condition(raw):
        return "its container runs, as far as the cluster knows, but its machine has stopped answering."
    return None


def image_pull(snapshot: Snapshot) -> Diagnosis | None:
    stuck = _waiting(snapshot, IMAGE_REASONS)
    if not stuck:
        return None
    error = image_error(snapshot.record, stuck[0])
    other = "" if stuck[0].reason == "ErrImageNeverPull" else " --image IMAGE"
    return Diagnosis(error.what, _held_up(snapshot, stuck), f"{error.remedy} Then: {go_on(snapshot)}{other}.")


def container_config(snapshot: Snapshot) -> Diagnosis | None:
    """A Secret, a key of it or a ConfigMap that is not there: told by the pod, or, for mounts, by an event."""
    after = (
        f"Pods start by themselves once it is there; after a change of the config: {go_on(snapshot, 'FIELD=VALUE')}."
    )
    if stuck := _waiting(snapshot, CONFIG_REASONS):
        what = config_error(snapshot.record, stuck[0], snapshot.place).what
        return Diagnosis(what, _held_up(snapshot, stuck), f"{_make_secret(snapshot, what)} {after}")
    for pod, said in _mount_events(snapshot) if snapshot.is_held_up else ():
        if _CONFIG_WORDS.search(said):
            what = f"The container of {pod.name} cannot be made: {said}"
            return Diagnosis(what, [f"Event FailedMount of {pod.name}: {said}"], f"Make it. {after}")
    return None


def _make_secret(snapshot: Snapshot, said: str) -> str:
    """The command that makes what is missing; the token never stands in one."""
    token = snapshot.record.config.launch.hf_token_secret
    missing = _NO_SECRET.search(said)
    name = missing[1] if missing else ""
    if token.name and (name == token.name or (not missing and "secret" in said.lower() and token.name in said)):
        options = f" --name {token.name}" if token.name != "hf-token" else ""
        options += f" --key {token.key}" if token.key != "token" else ""
        command = f"llmtrain secret hf-token --from-env-file .env{options}{snapshot.place}"
        return f"Make it: {command}. Or correct launch.hf_token_secret."
    if missing:
        command = f"kubectl create secret generic {name}{snapshot.place} --from-env-file FILE"
        return f"Make it: {command}. Or correct launch.env_secrets."
    return "Make it, or correct the launch section."


def _waiting(snapshot: Snapshot, reasons: tuple[str, ...]) -> list[PodStatus]:
    return [pod for pod, _ in snapshot.pods if pod.reason in reasons and snapshot.is_held_up]


def _held_up(snapshot: Snapshot, stuck: list[PodStatus]) -> list[str]:
    lines = [f"{pod.name} (node {pod.index}): {pod.reason}: {pod.message or ''}".rstrip(": ") for pod in stuck[:8]]
    return [*lines, f"{len(stuck)} of {snapshot.wanted} pods are held up by it."]


def claim(snapshot: Snapshot) -> Diagnosis | None:
    """A volume that is not there, not bound, or cannot be mounted."""
    held = _held(snapshot)
    if not held or not snapshot.is_held_up:
        return None
    about = [pod for pod in held if any(word in (pod.message or "").lower() for word in _VOLUME_WORDS)]
    missing = [name for name, phase in snapshot.claims.items() if phase == "missing"]
    missing += [found[1] for pod in about if (found := _NO_CLAIM.search(pod.message or ""))]
    unbound = [name for name, phase in snapshot.claims.items() if phase in ("Pending", "Lost")]
    evidence = [f"{pod.name} (node {pod.index}): {pod.message}" for pod in about[:4]]
    failing = [(pod, said) for pod, said in _mount_events(snapshot) if not _CONFIG_WORDS.search(said)]
    evidence += [f"Event FailedMount of {pod.name}: {said}" for pod, said in failing[:4]]
    evidence += [
        f"Event {event['reason']} of claim {event['involvedObject']['name']}: {one_line(event.get('message', ''))}"
        for event in snapshot.about("ProvisioningFailed", "FailedBinding")[:2]
    ]
    if missing:
        what, remedy = f"The claim {missing[0]} is not there.", _other_claim(snapshot, missing[0])
        return Diagnosis(what, [*evidence, *_phases(snapshot)], remedy)
    if not evidence:
        return None
    if unbound:
        what = f"The claim {unbound[0]} is not bound to a volume."
        remedy = f"Does the storage class exist, and can it do that access mode ({_fields(snapshot, unbound[0])})?"
    else:
        what = f"A volume cannot be mounted: {failing[0][1] if failing else evidence[0]}"
        remedy = "Look at the claim and the storage behind it; several machines need ReadWriteMany."
    return Diagnosis(what, [*evidence, *_phases(snapshot)], f"{remedy} Then: {go_on(snapshot)}.")


def _other_claim(snapshot: Snapshot, name: str) -> str:
    field = _fields(snapshot, name)
    if field.endswith(".claim"):
        return f"Make it: pods start by themselves then. Or name another: {go_on(snapshot, f'{field}=NAME')}."
    return f"It was made for the run, and somebody has deleted it. {go_on(snapshot)} makes it anew, empty."


def _phases(snapshot: Snapshot) -> list[str]:
    return [f"Claim {name}: {phase or 'unknown'}." for name, phase in snapshot.claims.items()]


def _fields(snapshot: Snapshot, name: str) -> str:
    volumes = snapshot.record.config.launch.volumes
    field = next((volume for volume, own in claim_names(snapshot.record).items() if own == name), "runs")
    is_named = field in volumes and volumes[field].claim
    return f"launch.{field}_volume.{'claim' if is_named else 'storage_class'}"


def _held(snapshot: Snapshot) -> list[PodStatus]:
    """Pods that have started nothing yet."""
    return [pod for pod, raw in snapshot.pods if pod.phase == "Pending" and not _has_begun(raw)]


def _has_begun(raw: Object) -> bool:
    rows = (raw.get("status") or {}).get("initContainerStatuses") or []
    return any(word in (row.get("state") or {}) for row in rows for word in ("running", "terminated"))


def _mount_events(snapshot: Snapshot) -> list[tuple[PodStatus, str]]:
    """Of pods that still wait for that: an event outlives what it tells of, and a mount may fail once at first."""
    held = {pod.name: pod for pod in _held(snapshot)}
    after = {_name(event): event_time(event) for event in reversed(snapshot.about(*_PAST_MOUNTS))}
    found = []
    for event in snapshot.about("FailedMount", "FailedAttachVolume"):
        name, said = _name(event), one_line(event.get("message", ""))
        if name in held and event_time(event) > after.get(name, "") and "failed to sync" not in said:
            found.append((held[name], said))
    return found


def _name(event: Object) -> str:
    return str((event.get("involvedObject") or {}).get("name"))


def quota_exceeded(snapshot: Snapshot) -> Diagnosis | None:
    said = _refusal(snapshot)
    if not said or "exceeded quota" not in said or (error := _admission_error(snapshot, said)) is None:
        return None
    return Diagnosis(
        error.what,
        [_made(snapshot), one_line(said)],
        f"{QUOTA_REMEDY} Pods are made as soon as there is room; to change the run: {go_on(snapshot, 'FIELD=VALUE')}.",
    )


def admission_refused(snapshot: Snapshot) -> Diagnosis | None:
    """Pod Security, or any other rule of the cluster that looks at pods."""
    said = _refusal(snapshot)
    if not said:
        return None
    error = _admission_error(snapshot, said)
    what = error.what if error else f"The cluster refuses to create the pods: {one_line(said)}"
    remedy = error.remedy if error else "Correct the launch section."
    if "serviceaccount" in said:
        remedy = "Create that service account."
    return Diagnosis(what, [_made(snapshot), one_line(said)], f"{remedy} Then: {go_on(snapshot)}.")


def _admission_error(snapshot: Snapshot, said: str) -> UsageError | None:
    record = snapshot.record
    return admission_error(f"pods of run {record.run_id}", record.namespace, said, record.config.launch)


def _refusal(snapshot: Snapshot) -> str | None:
    """Of now: once a pod was made, what was said before is over."""
    if snapshot.job is None or not snapshot.is_held_up or len(snapshot.pods) >= snapshot.wanted:
        return None
    made_at = max(map(event_time, snapshot.about("SuccessfulCreate", "SuccessfulCreatePod")), default="")
    return refusal(snapshot.record, snapshot.job, [event for event in snapshot.events if event_time(event) >= made_at])


def _made(snapshot: Snapshot) -> str:
    return f"{len(snapshot.pods)} of {snapshot.wanted} pods are there."


def unschedulable(snapshot: Snapshot) -> Diagnosis | None:
    held = [pod for pod, _ in snapshot.pods if pod.reason == "Unschedulable"]
    if not held or not snapshot.is_held_up:
        return None
    said = Counter(pod.message or "" for pod in held).most_common(1)[0][0]
    room = parse_unschedulable(said)
    ask = snapshot.record.config.launch.resources
    amounts = {"cpu": ask.cpu, "memory": ask.memory, ask.gpu_resource: str(ask.gpus)}
    short = ", ".join(
        f"{name} (each pod asks for {amounts[name]}) on {machines} of {room.nodes} machines"
        if name in amounts
        else f"{name} on {machines} of {room.nodes} machines"
        for name, machines in room.insufficient.items()
    )
    others = "; ".join(f"{machines} {why}" for machines, why in room.reasons if not why.startswith("Insufficient "))
    why = " ".join(part for part in (f"Too little {short}." if short else "", f"{others}." if others else "") if part)
    evidence = [f"{pod.name} (node {pod.index}): {pod.message}" for pod in held[:3]]
    evidence += [f"... and {len(held) - 3} more."] if len(held) > 3 else []
    evidence.append(f"{len(snapshot.pods) - len(held)} of {snapshot.wanted} pods are placed.")
    what = f"{len(held)} of {snapshot.wanted} pods find no machine. {why or said}".strip()
    return Diagnosis(what, evidence, _room(snapshot, room))


def _room(snapshot: Snapshot, room: Unschedulable) -> str:
    resources = snapshot.record.config.launch.resources
    names = {"cpu": "cpu", "memory": "memory", resources.gpu_resource: "gpus"}
    fields = [f"launch.resources.{names[name]}" for name in room.insufficient if name in names]
    fields += ["launch.processes_per_node"] if resources.gpu_resource in room.insufficient else []  # one GPU for each
    fields += ["launch.nodes"] if room.insufficient else []
    fields += room.fields
    change = f"Ask for less or otherwise ({', '.join(fields)}): {go_on(snapshot, 'FIELD=VALUE')}." if fields else ""
    return f"{change} Pods start by themselves when a machine has room.".strip()
