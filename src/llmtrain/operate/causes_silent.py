"""A run whose pods run and that says nothing more: told by the heartbeats on its volume."""

from llmtrain.operate.answers import Found, go_on
from llmtrain.operate.clues import Clues
from llmtrain.operate.view import age_text


def rank_silent(clues: Clues) -> Found | None:
    silence = clues.silence
    if silence is None or not silence.dead or silence.moving:
        return None
    each = clues.status.processes_per_node
    names = {pod.index: f"{pod.name} on {pod.node}" for pod, _ in clues.pods}
    lines = [
        f"Rank {rank} ({names.get(rank // each, 'no pod')}): no heartbeat"
        + (f" since step {silence.steps[rank]}." if rank in silence.steps else ", ever.")
        for rank in silence.dead[:8]
    ]
    return Found(
        f"Rank {', '.join(map(str, silence.dead[:8]))} hangs: its heart has stopped, and the others wait for it.",
        [_quiet(clues), *lines],
        f"The others give up after {clues.record.config.distributed.timeout_sec} s (distributed.timeout_sec), and the "
        f"run starts again. Sooner: {go_on(clues)}.",
    )


def no_progress(clues: Clues) -> Found | None:
    """Every rank answers and none moves; or nobody can look."""
    silence = clues.silence
    if silence is None or silence.moving or silence.dead or not clues.is_running:
        return None
    seen = f"Heartbeats cannot be read: {silence.problem}" if silence.dead is None else _steps(silence.steps)
    return Found(
        f"The run says nothing since {age_text(silence.seconds)}, and no progress shows.",
        [_quiet(clues), seen],
        f"A long step, evaluation or save is possible: look again (llmtrain why {clues.run}). Else: {go_on(clues)}.",
    )


def _steps(steps: dict[int, int]) -> str:
    return f"Every rank answers, none moves; they are at step {', '.join(map(str, sorted(set(steps.values()))))}."


def _quiet(clues: Clues) -> str:
    seconds = clues.silence.seconds if clues.silence else 0.0
    return f"The last line of rank 0's log is {age_text(seconds)} old."
