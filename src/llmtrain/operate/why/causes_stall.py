"""A run whose pods run and that says nothing more: told by the heartbeats on its volume."""

from llmtrain.operate.status.view import age_text
from llmtrain.operate.why.diagnosis import Diagnosis, go_on
from llmtrain.operate.why.snapshot import Snapshot

MOST_NAMED = 4  # pods in one line


def rank_silent(snapshot: Snapshot) -> Diagnosis | None:
    silence = snapshot.silence
    if silence is None or not silence.dead or silence.moving:
        return None
    each = snapshot.status.processes_per_node
    pods = {pod.index: pod for pod, _ in snapshot.pods}
    where = {index: f"{pod.name} on {pod.node}" for index, pod in pods.items()}
    lines = [
        f"Rank {rank} ({where.get(rank // each, 'no pod')}): no heartbeat"
        + (f" since step {silence.steps[rank]}." if rank in silence.steps else ", ever.")
        for rank in silence.dead[:8]
    ]
    hanging = [pods[index].name for index in dict.fromkeys(rank // each for rank in silence.dead) if index in pods]
    how = f"llmtrain recover {snapshot.run} replaces {_pods(hanging)}" if hanging else go_on(snapshot)
    return Diagnosis(
        _who_hangs(silence.dead, snapshot.status.world_size),
        [_quiet(snapshot), *lines],
        f"It does not end by itself: {how}. The run goes on from its newest checkpoint.",
        tuple(hanging),
    )


def _pods(names: list[str]) -> str:
    return f"{', '.join(names[:MOST_NAMED])}{', ...' if len(names) > MOST_NAMED else ''}"


def _who_hangs(dead: list[int], world_size: int) -> str:
    if len(dead) == world_size:
        return (
            "Every rank hangs: no heart beats any more." if world_size > 1 else "Rank 0 hangs: its heart has stopped."
        )
    if len(dead) > 1:
        named = f"{', '.join(map(str, dead[:8]))}{', ...' if len(dead) > 8 else ''}"
        return f"Ranks {named} hang: their hearts have stopped, and the others wait for them."
    return f"Rank {dead[0]} hangs: its heart has stopped, and the others wait for it."


def no_progress(snapshot: Snapshot) -> Diagnosis | None:
    """Every rank answers and none moves; or nobody can look."""
    silence = snapshot.silence
    if silence is None or silence.moving or silence.dead or not snapshot.is_running:
        return None
    seen = f"Heartbeats cannot be read: {silence.problem}" if silence.dead is None else _steps(silence.steps)
    return Diagnosis(
        f"The run says nothing since {age_text(silence.seconds)}, and no progress shows.",
        [_quiet(snapshot), seen],
        f"A long step, evaluation or save is possible: look again (llmtrain why {snapshot.run}). "
        f"Else: {go_on(snapshot)}.",
    )


def _steps(steps: dict[int, int]) -> str:
    return f"Every rank answers, none moves; they are at step {', '.join(map(str, sorted(set(steps.values()))))}."


def _quiet(snapshot: Snapshot) -> str:
    seconds = snapshot.silence.seconds if snapshot.silence else 0.0
    return f"The last line of rank 0's log is {age_text(seconds)} old."
