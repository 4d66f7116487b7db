"""The watchdog: a thread that writes this rank's heartbeat and ends the process if the run makes no progress.

A rank that hangs leaves the others blocked inside a collective, where their main threads run no Python code. The
watchdog fires after distributed.timeout_sec, before the collective library would abort, and names the rank
that stopped responding.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from llmtrain.distributed.world import World
from llmtrain.errors import PeerLost
from llmtrain.runs.exit_report import exit_now, set_position
from llmtrain.runs.heartbeats import Beat, Heartbeat, read_heartbeats, started_again

BEAT_SEC = 2.0
CHECK_SEC = 0.25
MIN_STALL_SEC = 5.0  # without progress, after a pod of the run was replaced


class Watchdog:
    def __init__(
        self, folder: Path, world: World, generation: int, timeout_sec: float, starts: Sequence[str] = ()
    ) -> None:
        """`starts` identifies the current start of each pod of the run, see announce_start."""
        self._folder = folder
        self._world = world
        self._timeout_sec = timeout_sec
        self._starts = starts
        self._heartbeat = Heartbeat(folder, world.rank, generation)
        self._step = self._progress = 0
        self._ticked_at = time.monotonic()
        self._longest_gap = 0.0  # between two recent ticks
        self._replacement: tuple[int, str] | None = None  # (node_rank, start) of a pod that started again
        self._ignored: tuple[int, str] | None = None
        self._replaced_at = 0.0
        self._replaced_step = 0
        self._earlier_beats: dict[int, Beat] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def tick(self, step: int | None = None) -> None:
        """Report that this rank makes progress."""
        if step is not None:
            self._step = step
            set_position(step=step)
        self._progress += 1
        now = time.monotonic()
        self._longest_gap = max(now - self._ticked_at, 0.9 * self._longest_gap)
        self._ticked_at = now

    def __enter__(self) -> "Watchdog":
        self.tick()
        self._heartbeat.write(self._step, self._progress)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._heartbeat.write(self._step, self._progress)

    def _watch(self) -> None:
        beat_sec = min(BEAT_SEC, self._timeout_sec / 4)
        written = time.monotonic()
        while not self._stopped.wait(CHECK_SEC):
            now = time.monotonic()
            if now - written >= beat_sec:
                self._heartbeat.write(self._step, self._progress)
                written = now
                self._check_for_replaced_pods(now)
            waiting = now - self._ticked_at
            if self._world.world_size == 1:
                continue
            if waiting > self._timeout_sec:
                self._give_up(waiting)
            if waiting > self._timeout_sec / 2:
                self._earlier_beats = self._earlier_beats or read_heartbeats(self._folder)
            else:
                self._earlier_beats = {}

    def _check_for_replaced_pods(self, now: float) -> None:
        """Exit early if a pod of the run was replaced. A node that lost power or network leaves its connections open,
        so its peers would otherwise wait for timeout_sec. A new start alone proves nothing (an abandoned pod may be
        started again where it is): while all ranks still take steps together, none of them was replaced."""
        start = started_again(self._folder, self._starts) if self._starts else None
        if start is None or start == self._ignored:
            return
        if start != self._replacement:
            self._replacement = start
            self._replaced_at = now
            self._replaced_step = self._step
        elif self._step > self._replaced_step + 1:
            self._ignored = start
        elif now - max(self._replaced_at, self._ticked_at) > max(MIN_STALL_SEC, 2 * self._longest_gap):
            exit_now(
                PeerLost(
                    f"Pod {start[0]} of the run was replaced, so this process stops at step {self._step}.",
                    remedy="No action is needed: the platform restarts this pod, and the run resumes from its newest "
                    "checkpoint.",
                )
            )

    def _give_up(self, waiting: float) -> None:
        silent, description = self._find_silent_ranks()
        error = PeerLost(
            f"No progress for {waiting:.0f} s at step {self._step}: {description}.",
            remedy="Look at that rank's log and node. Restart the run: it resumes from the newest checkpoint.",
            reason="no_progress",
        )
        error.details = {"silent_ranks": silent}
        exit_now(error)

    def _find_silent_ranks(self) -> tuple[list[int], str]:
        now = read_heartbeats(self._folder)
        others = [rank for rank in range(self._world.world_size) if rank != self._world.rank]
        earlier = self._earlier_beats
        silent = [r for r in others if r not in now or now[r].get("beat") == earlier.get(r, {}).get("beat")]
        if silent:
            return silent, "; ".join(_describe(r, now.get(r), "stopped sending heartbeats") for r in silent)
        lowest = min(now[r]["progress"] for r in others)
        behind = [r for r in others if now[r]["progress"] == lowest < self._progress]
        if behind:
            return behind, "; ".join(_describe(r, now[r], "sends heartbeats but makes no progress") for r in behind)
        return [], "every rank sends heartbeats, but none makes progress"


def _describe(rank: int, beat: Beat | None, what: str) -> str:
    if beat is None:
        return f"rank {rank} never sent a heartbeat"
    return f"rank {rank} {what} (pid {beat['pid']} on {beat['host']}, last seen at step {beat['step']})"
