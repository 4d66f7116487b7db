"""The watchdog: writes this rank's heartbeat, and ends the process when the others keep it waiting too long.

A rank that hangs leaves the others inside a collective, where no Python code runs any more. This thread still does. It
fires at distributed.timeout_sec, before the collective library would abort, and names the rank that went silent.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from llmtrain.distributed.world import World
from llmtrain.errors import PeerLost
from llmtrain.runs.exit_report import exit_now, report_to_run, set_position
from llmtrain.runs.heartbeats import Beat, Heartbeat, read_heartbeats, started_again

BEAT_SEC = 2.0
CHECK_SEC = 0.25
STILL_SEC = 5.0  # without a move, after a node was started anew


class Watchdog:
    def __init__(
        self, folder: Path, world: World, generation: int, timeout_sec: float, starts: Sequence[str] = ()
    ) -> None:
        """`starts`: of the nodes of this run, see announce_start."""
        self._folder, self._world, self._timeout_sec, self._starts = folder, world, timeout_sec, starts
        self._heartbeat = Heartbeat(folder, world.rank, generation)
        self._step = self._progress = 0
        set_position(generation=generation)
        report_to_run(folder.parent / "exits")
        self._moved_at = time.monotonic()
        self._gap = 0.0  # the longest wait between two moves, of late
        self._successor: tuple[int, str] | None = None
        self._foreign: tuple[int, str] | None = None
        self._seen_at, self._seen_step = 0.0, 0
        self._before: dict[int, Beat] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def tick(self, step: int | None = None) -> None:
        """This rank moves."""
        if step is not None:
            self._step = step
            set_position(step=step)
        self._progress += 1
        now = time.monotonic()
        self._gap = max(now - self._moved_at, 0.9 * self._gap)
        self._moved_at = now

    def __enter__(self) -> "Watchdog":
        self.tick()
        self._heartbeat.write(self._step, self._progress)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._heartbeat.write(self._step, self._progress)

    def _watch(self) -> None:
        beat_sec = min(BEAT_SEC, self._timeout_sec / 4)
        written = time.monotonic()
        while not self._done.wait(CHECK_SEC):
            now = time.monotonic()
            if now - written >= beat_sec:
                self._heartbeat.write(self._step, self._progress)
                written = now
                self._look_for_successors(now)
            waiting = now - self._moved_at
            if self._world.world_size == 1:
                continue
            if waiting > self._timeout_sec:
                self._give_up(waiting)
            if waiting > self._timeout_sec / 2:
                self._before = self._before or read_heartbeats(self._folder)
            else:
                self._before = {}

    def _look_for_successors(self, now: float) -> None:
        """A machine that went without a word (no power, no network) leaves its connections open: nobody would notice
        until timeout_sec. But a start alone proves nothing (a pod that was given up may be started again where it is):
        while all ranks still take steps together, none of them was replaced."""
        found = started_again(self._folder, self._starts) if self._starts else None
        if found is None or found == self._foreign:
            return
        if found != self._successor:
            self._successor, self._seen_at, self._seen_step = found, now, self._step
        elif self._step > self._seen_step + 1:
            self._foreign = found
        elif now - max(self._seen_at, self._moved_at) > max(STILL_SEC, 2 * self._gap):
            exit_now(
                PeerLost(
                    f"Node {found[0]} was started anew, so this start of the run is over, at step {self._step}.",
                    remedy="Nothing is to be done: the platform starts this one again too, and the run goes on from "
                    "its newest checkpoint.",
                )
            )

    def _give_up(self, waiting: float) -> None:
        silent, words = self._name_the_silent()
        error = PeerLost(
            f"No progress for {waiting:.0f} s at step {self._step}: {words}.",
            remedy="Look at that rank's log and machine. Start the run again: it goes on from the newest checkpoint.",
            reason="no_progress",
        )
        error.details = {"silent_ranks": silent}
        exit_now(error)

    def _name_the_silent(self) -> tuple[list[int], str]:
        now = read_heartbeats(self._folder)
        others = [rank for rank in range(self._world.world_size) if rank != self._world.rank]
        silent = [r for r in others if r not in now or now[r].get("beat") == self._before.get(r, {}).get("beat")]
        if silent:
            return silent, "; ".join(_describe(r, now.get(r), "has gone silent") for r in silent)
        least = min(now[r]["progress"] for r in others)
        behind = [r for r in others if now[r]["progress"] == least < self._progress]
        if behind:
            return behind, "; ".join(_describe(r, now[r], "answers but is stuck") for r in behind)
        return [], "every rank answers, none moves"


def _describe(rank: int, beat: Beat | None, what: str) -> str:
    if beat is None:
        return f"rank {rank} {what} (it never wrote a heartbeat)"
    return f"rank {rank} {what} (pid {beat['pid']} on {beat['host']}, last seen at step {beat['step']})"
