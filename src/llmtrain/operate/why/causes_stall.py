"""Runs whose pods are running but whose log has stopped or cannot be read, diagnosed from their heartbeats."""

from llmtrain.operate.status.view import age_text
from llmtrain.operate.why.diagnosis import MAX_LISTED, Diagnosis, resume_command
from llmtrain.operate.why.snapshot import Snapshot, Stall

MAX_NAMED = 4  # pods in one line


def rank_hung(snapshot: Snapshot) -> Diagnosis | None:
    stall = snapshot.stall
    if stall is None or not stall.silent_ranks or stall.advancing_ranks:
        return None
    per_pod = snapshot.status.processes_per_node
    pods = {pod.index: pod for pod, _ in snapshot.pods}
    locations = {index: f"{pod.name} on {pod.node}" for index, pod in pods.items()}
    lines = [
        f"Rank {rank} ({locations.get(rank // per_pod, 'no pod')}): no heartbeat"
        + (f" since step {stall.steps[rank]}." if rank in stall.steps else " so far.")
        for rank in stall.silent_ranks[:MAX_LISTED]
    ]
    indexes = dict.fromkeys(rank // per_pod for rank in stall.silent_ranks)
    hung = [pods[index].name for index in indexes if index in pods]
    command = f"llmtrain recover {snapshot.run}" if hung else resume_command(snapshot)
    replaced = f" It replaces {_names(hung)}." if hung else ""
    return Diagnosis(
        _summary(stall, snapshot.status.world_size),
        [*_log_age(stall), *lines],
        f"A hung process does not exit. Run: {command}.{replaced} The run resumes from its newest checkpoint.",
        tuple(hung),
    )


def _names(names: list[str]) -> str:
    return f"{', '.join(names[:MAX_NAMED])}{', ...' if len(names) > MAX_NAMED else ''}"


def _summary(stall: Stall, world_size: int) -> str:
    ranks = stall.silent_ranks or []
    if len(ranks) == world_size:
        logged = "" if stall.seconds is None else f", and the run has logged nothing for {age_text(stall.seconds)}"
        return f"No rank sends heartbeats{logged}."
    if len(ranks) > 1:
        listed = f"{', '.join(map(str, ranks[:MAX_LISTED]))}{', ...' if len(ranks) > MAX_LISTED else ''}"
        return f"Ranks {listed} hang: they send no heartbeats, and the other ranks wait for them."
    return f"Rank {ranks[0]} hangs: it sends no heartbeats, and the other ranks wait for it."


def no_progress(snapshot: Snapshot) -> Diagnosis | None:
    """All ranks send heartbeats but none advances, or heartbeats cannot be read."""
    stall = snapshot.stall
    if stall is None or stall.advancing_ranks or stall.silent_ranks or not snapshot.is_running:
        return None
    if stall.seconds is None:  # a step may take longer than the heartbeats were watched
        return None
    evidence = f"Heartbeats cannot be read: {stall.error}" if stall.silent_ranks is None else _steps(stall.steps)
    return Diagnosis(
        f"The run has logged nothing for {age_text(stall.seconds)} and makes no progress.",
        [*_log_age(stall), evidence],
        "A long step, evaluation or checkpoint can cause this. Wait and check again: llmtrain why "
        f"{snapshot.run}. If it persists: {resume_command(snapshot)}.",
    )


def _steps(steps: dict[int, int]) -> str:
    listed = ", ".join(map(str, sorted(set(steps.values()))))
    return f"All ranks send heartbeats, but none advances; they are at step {listed}."


def _log_age(stall: Stall) -> list[str]:
    return [] if stall.seconds is None else [f"The last line of rank 0's log is {age_text(stall.seconds)} old."]
