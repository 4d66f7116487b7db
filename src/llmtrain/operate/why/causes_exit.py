"""Why containers ended: by their exit codes, the cluster's word for it, and what they said last."""

from llmtrain.kubernetes.api_errors import one_line
from llmtrain.operate.status.container_exits import ContainerExit, age_of
from llmtrain.operate.status.events import event_time
from llmtrain.operate.status.lost_nodes import find_condition
from llmtrain.operate.status.pods import PodStatus, container_state
from llmtrain.operate.status.view import memory_text
from llmtrain.operate.why.diagnosis import (
    Diagnosis,
    again,
    code_only,
    evidence_of,
    go_on,
    message_of,
    others,
    with_code,
)
from llmtrain.operate.why.log_patterns import last_words, traceback_end
from llmtrain.operate.why.snapshot import UNREACHABLE, Snapshot

_PREEMPTED = ("PreemptionByScheduler", "Preempting", "Preempted")
EVENT_SEC = 900.0  # that an event may be old to have to do with what is seen now
_EXPLAINED = (0, 64, 65, 69, 75, 137, 143)
_BY_THE_CLUSTER = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "removed for a taint of its machine",
    "EvictionByEvictionAPI": "evicted: its machine was drained",
    "DeletionByPodGC": "removed with its machine",
    "Preempted": "preempted by a pod of higher priority",
    "Evicted": "evicted",
    "TaintManagerEviction": "removed for a taint of its machine",
    "TerminationByKubelet": "ended by its machine, which was short of something or shut down",
}


def oom_killed(snapshot: Snapshot) -> Diagnosis | None:
    killed = [end for end in snapshot.exits if end.reason == "OOMKilled"]
    if not killed:
        return None
    first, ask = killed[0], snapshot.record.config.launch.resources
    used = [
        f"{pod} uses {memory_text(memory)} now, of {ask.memory}." for pod, memory in list(snapshot.usage.items())[:4]
    ]
    return Diagnosis(
        f"{first.pod} (node {first.index}) ran out of memory: its limit is {ask.memory} (launch.resources.memory), of "
        f"which up to {ask.shm_size} is shared memory.",
        [*(end.text for end in killed[:4]), *used, *others(snapshot, killed)],
        f"Give it more: {go_on(snapshot, f'launch.resources.memory={_doubled(ask.memory)}')}. Or let a new run use "
        "less: trainer.micro_batch_size.",
    )


def _doubled(quantity: str) -> str:
    number = quantity.rstrip("mkMGTPi")
    return f"{float(number) * 2:g}{quantity[len(number) :]}"


def evicted(snapshot: Snapshot) -> Diagnosis | None:
    return _disrupted(snapshot, is_preempted=False)


def preempted(snapshot: Snapshot) -> Diagnosis | None:
    return _disrupted(snapshot, is_preempted=True)


def _disrupted(snapshot: Snapshot, is_preempted: bool) -> Diagnosis | None:
    """Told by pods that have ended, by pods that are about to, or, where they are gone, by events."""
    if snapshot.status.state not in ("failed", "restarting", "pending", "starting"):
        return None
    for end in snapshot.exits:
        reason = end.disruption or end.pod_reason
        if reason and (reason in _PREEMPTED) == is_preempted:
            said = end.pod_message or end.disruption_message
            return _by_the_cluster(snapshot, end.pod, end.node, reason, said, [end.text])
    for pod, raw in snapshot.pods:
        row = find_condition(raw, "DisruptionTarget") or {}
        if pod.phase == "Terminating" and row and (row.get("reason") in _PREEMPTED) == is_preempted:
            said, more = str(row.get("message") or ""), [f"{pod.name} (node {pod.index}) is still ending."]
            return _by_the_cluster(snapshot, pod.name, pod.node or "", str(row.get("reason")), said, more)
    return _disrupted_by_events(snapshot, is_preempted)


def _disrupted_by_events(snapshot: Snapshot, is_preempted: bool) -> Diagnosis | None:
    if any(end.code not in (75, 143) for end in snapshot.exits):  # then it is not for that
        return None
    for event in snapshot.about(*(("Preempted",) if is_preempted else ("Evicted", "TaintManagerEviction"))):
        said, about = str(event.get("message", "")), event["involvedObject"]
        is_over = said.startswith("Cancelling") or age_of(event_time(event)) > EVENT_SEC
        if about.get("kind") == "Pod" and not is_over:
            return _by_the_cluster(snapshot, about["name"], "", event["reason"], said, [])
    return None


def _by_the_cluster(snapshot: Snapshot, pod: str, node: str, reason: str, said: str, more: list[str]) -> Diagnosis:
    words = _BY_THE_CLUSTER.get(reason, f"ended by the cluster ({reason})")
    is_short = "low on resource" in said
    remedy = "It goes on from its newest checkpoint as soon as its pods have room"
    if snapshot.status.state == "failed":
        remedy = f"Go on: {go_on(snapshot)}"
    hint = "launch.priority_class" if "reempt" in reason else "launch.resources" if is_short else ""
    hint = hint or "launch.pod_disruption_budget"
    where = f" on {node}" if node else ""
    return Diagnosis(
        f"{pod}{where} was {words}{f': {one_line(said)}' if said else '.'}",
        [f"{pod}: {reason}: {one_line(said)}", *more],
        f"{remedy}. {hint} makes it rarer.",
    )


def killed(snapshot: Snapshot) -> Diagnosis | None:
    """137 without the cluster's word for it. A rank that hung is killed too, after the others have named it."""
    end = with_code(snapshot, 137)
    named = [
        e for e in snapshot.exits if e.report and e.report.silent_ranks and e.at and e.at <= (end.at if end else "")
    ]
    if end is None or named:
        return None
    unsaid = "the cluster does not say that it was for memory"
    if not end.container:  # told by an event
        unsaid = "its pod is gone, and with it whether it was for memory"
    memory = snapshot.record.config.launch.resources.memory
    return Diagnosis(
        f"{end.pod} (node {end.index}) was killed (SIGKILL), and {unsaid}.",
        [
            *evidence_of(snapshot, end, last_words(end.lines)),
            f"Its memory limit is {memory} (launch.resources.memory).",
        ],
        f"Out of memory, most likely: {go_on(snapshot, f'launch.resources.memory={_doubled(memory)}')}. Or killed by "
        f"somebody: look at {f'the machine {end.node}' if end.node else 'its machine'}. {again(snapshot)}",
    )


def crash(snapshot: Snapshot) -> Diagnosis | None:
    end = next((end for end in snapshot.exits if end.code not in _EXPLAINED), None)
    if end is None:
        return None
    said = traceback_end(end.lines) or message_of(end) or one_line(end.message) or last_words(end.lines)
    words = f"{end.pod} (node {end.index}) crashed with exit code {end.code}"
    return Diagnosis(
        f"{words}: {said}" if said else f"{words}.",
        evidence_of(snapshot, end, said),
        f"llmtrain logs {snapshot.run} --rank {end.index * snapshot.status.processes_per_node} shows all of it. "
        f"{again(snapshot)}",
    )


def master_unreachable(snapshot: Snapshot) -> Diagnosis | None:
    missed = [end for end in snapshot.exits if end.code == UNREACHABLE and _reason(end) == "master_unreachable"]
    end = next(iter(missed), None) or with_code(snapshot, UNREACHABLE)  # whoever looked for the master knows most
    if end is None:
        return None
    if snapshot.has_service is False:
        return _no_service(snapshot, end)
    said = message_of(end)
    first = next((pod for pod, _ in snapshot.pods if pod.index == 0), None)
    what = "The processes did not find each other in time"
    if _reason(end) == "master_unreachable":
        is_there = first is not None and first.is_running
        what = "The master (node 0) runs, but is not reached" if is_there else "The master (node 0) never came up"
    elif _reason(end) == "processes_missing":
        what = "The run never became whole"
    elif end.report and end.report.error != "JoinError":
        what = "Something that it needs could not be reached"
    own = f"{end.report.remedy} " if end.report and end.report.remedy else ""
    about_first = f"Node 0: {f'{first.name}, {first.phase}' if first else 'there is no pod'}."
    return Diagnosis(
        f"{what}{f': {said}' if said else '.'}",
        [*evidence_of(snapshot, end, said), about_first],
        f"llmtrain logs {snapshot.run} --rank 0 shows what node 0 did. {own}{again(snapshot)}",
    )


def _reason(end: ContainerExit) -> str | None:
    return end.report.reason if end.report else None


def _no_service(snapshot: Snapshot, end: ContainerExit) -> Diagnosis:
    name, said = snapshot.record.plan.service, message_of(end)
    return Diagnosis(
        f"The Service {name} is gone, and without it no pod finds the master (node 0): somebody deleted it.",
        [f"Service {name}: not there.", *evidence_of(snapshot, end, said)],
        f"No other start mends that: {go_on(snapshot)} makes it anew.",
    )


def rank_hung(snapshot: Snapshot) -> Diagnosis | None:
    """What the watchdog of the survivors said."""
    end = next((end for end in snapshot.exits if _reason(end) == "no_progress"), None)
    if end is None or end.report is None:
        return None
    ranks, said = list(end.report.silent_ranks), end.report.message
    what = f"Rank {', '.join(map(str, ranks))} hung" if ranks else "The ranks wait for each other, and none moves"
    each = snapshot.status.processes_per_node
    where = [f"Rank {rank} is of node {rank // each}: {_pod_of(snapshot, rank // each)}." for rank in ranks[:4]]
    look = f"llmtrain logs {snapshot.run} --rank {ranks[0] if ranks else 0} shows what it did last."
    hanging = _still_hanging(snapshot, end, [rank // each for rank in ranks])
    after = again(snapshot)
    if hanging:
        names = [pod.name for pod in hanging[:4]]
        where += [f"{name} still runs: the others, started again, wait for it." for name in names]
        after = f"As long as it hangs nothing goes on: llmtrain recover {snapshot.run} replaces it."
    evidence = [*evidence_of(snapshot, end, said), *where]
    return Diagnosis(f"{what}: {said}", evidence, f"{look} {after}", tuple(pod.name for pod in hanging))


def _still_hanging(snapshot: Snapshot, end: ContainerExit, indexes: list[int]) -> list[PodStatus]:
    """Pods that run since before the others gave up on them. A process that is frozen notices nothing, and no platform
    ends it."""
    found = []
    for pod, raw in snapshot.pods:
        running = container_state(raw, snapshot.record.workload.container)[0].get("running") or {}
        if snapshot.is_active and pod.index in indexes and pod.is_running and running.get("startedAt", "9") < end.at:
            found.append(pod)
    return found


def interrupted(snapshot: Snapshot) -> Diagnosis | None:
    """Told to stop by somebody who is none of ours: a deleted pod, say."""
    end = next((end for end in snapshot.exits if end.code == 143 or (end.code == 75 and _was_told(end))), None)
    if end is not None:
        said = message_of(end)
        what = f"{end.pod} (node {end.index}) was told to stop, and did{f': {said}' if said else '.'}"
        return Diagnosis(what, evidence_of(snapshot, end, said), again(snapshot))
    leaving = next((pod for pod, _ in snapshot.pods if pod.phase == "Terminating" and snapshot.is_active), None)
    if leaving is None:
        return None
    where = f" from {leaving.node}" if leaving.node else ""
    return Diagnosis(
        f"{leaving.name} (node {leaving.index}) is being removed{where}: somebody deleted it.",
        [f"{leaving.name} is Terminating, and the cluster names no reason of its own."],
        again(snapshot),
    )


def _was_told(end: ContainerExit) -> bool:
    if end.report and end.report.error:
        return end.report.error == "Interrupted"
    return any("SIGTERM" in line for line in end.lines[-3:])


def peer_lost(snapshot: Snapshot) -> Diagnosis | None:
    """What is left of 75: a peer that went without a trace, or logs that cannot be read."""
    end = with_code(snapshot, 75)
    if end is None:
        return None
    said = message_of(end)
    return Diagnosis(
        f"A process of the run went away, and left nothing that says why: {said}" if said else code_only(end),
        evidence_of(snapshot, end, said),
        f"Pods that were deleted leave no trace. {again(snapshot)}",
    )


def _pod_of(snapshot: Snapshot, index: int) -> str:
    found = next((pod for pod, _ in snapshot.pods if pod.index == index), None)
    return f"{found.name}{f' on {found.node}' if found.node else ''}" if found else "no pod of it is there"
