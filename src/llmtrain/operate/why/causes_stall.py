"""Runs whose pods are running but whose log has stopped or cannot be read, diagnosed from their heartbeats."""

from llmtrain.operate.status.view import age_text
from llmtrain.operate.why.diagnosis import MAX_LISTED, Diagnosis, listed, resume_command
from llmtrain.operate.why.snapshot import Snapshot, Stall

MAX_NAMED = 4  # pods in one line


def rank_hung(snapshot: Snapshot) -> Diagnosis | None:
    stall = snapshot.stall
    if stall is None or not stall.silent_ranks or stall.advancing_ranks:
        return None
    per_pod = snapshot.status.processes_per_node
    pods = {pod.index: pod for pod, _ in snapshot.pods}
    evidence = _log_age(stall)
    for rank in stall.silent_ranks[:MAX_LISTED]:
        pod = pods.get(rank // per_pod)
        place = f"{pod.name} on {pod.node}" if pod else "no pod"
        since = f"since step {stall.steps[rank]}" if rank in stall.steps else "so far"
        evidence.append(f"Rank {rank} ({place}): no heartbeat {since}.")
    silent_pods = {rank // per_pod for rank in stall.silent_ranks}
    hung = [pod.name for index, pod in sorted(pods.items()) if index in silent_pods]
    command = f"{resume_command(snapshot)}."
    if hung:
        command = f"llmtrain recover {snapshot.run}. It replaces {listed(hung, MAX_NAMED)}."
    return Diagnosis(
        _summary(stall, snapshot.status.world_size),
        evidence,
        f"A hung process does not exit. Run: {command} The run resumes from its newest checkpoint.",
        tuple(hung),
    )


def _summary(stall: Stall, world_size: int) -> str:
    ranks = stall.silent_ranks or []
    if len(ranks) == world_size:
        text = "No rank sends heartbeats"
        if stall.seconds is not None:
            text += f", and the run has logged nothing for {age_text(stall.seconds)}"
        return f"{text}."
    if len(ranks) > 1:
        return f"Ranks {listed(ranks)} hang: they send no heartbeats, and the other ranks wait for them."
    return f"Rank {ranks[0]} hangs: it sends no heartbeats, and the other ranks wait for it."


def no_progress(snapshot: Snapshot) -> Diagnosis | None:
    """All ranks send heartbeats but none advances, or heartbeats cannot be read."""
    stall = snapshot.stall
    if stall is None or stall.advancing_ranks or stall.silent_ranks:
        return None
    if stall.seconds is None:  # a step may take longer than the heartbeats were watched
        return None
    evidence = _log_age(stall)
    if stall.silent_ranks is None:
        evidence.append(f"Heartbeats cannot be read: {stall.error}")
    else:
        evidence.append(_steps(stall.steps))
    return Diagnosis(
        f"The run has logged nothing for {age_text(stall.seconds)} and makes no progress.",
        evidence,
        "A long step, evaluation or checkpoint can cause this. Wait and check again: llmtrain why "
        f"{snapshot.run}. If it persists: {resume_command(snapshot)}.",
    )


def _steps(steps: dict[int, int]) -> str:
    numbers = ", ".join(map(str, sorted(set(steps.values()))))
    return f"All ranks send heartbeats, but none advances; they are at step {numbers}."


def _log_age(stall: Stall) -> list[str]:
    if stall.seconds is None:
        return []
    return [f"The last line of rank 0's log is {age_text(stall.seconds)} old."]
