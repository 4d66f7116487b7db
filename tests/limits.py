"""How long tests wait: limit(60) is a minute on an idle machine, and longer on a slow or busy one.

    subprocess.run(command, timeout=limit(60))
    wait_until(path.exists, 10)

Every time limit of a test goes through here, and so does the limit of a whole test: see stack_dumps.py. The harnesses
(rank_harness, fault_harness) apply it to the seconds that they are given.
"""

import os
import statistics
import sys
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

T = TypeVar("T")
REFERENCE_SEC = 0.05
"""What the probe takes on the idle machine on which the limits of the tests were chosen."""
AT_MOST = 10.0
"""A test that hangs on a busy machine has to fail at some time."""
MEASURE_EVERY_SEC = 20.0
REMEMBER_SEC = 120.0
# Starting a process is most of what tests wait for. One that starts and computes slows down under load as an import of
# torch does; a loop in this process, which has just waited, is given more of the CPU than that.
_PROBE = [sys.executable, "-I", "-S", "-c", "x = 0\nfor i in range(500_000): x += i"]
_measured: list[tuple[float, float]] = []


def limit(seconds: float) -> float:
    """The seconds that something may take which takes at most so many on an idle machine."""
    return seconds * slowness()


def wait_until(condition: Callable[[], T], seconds: float = 60.0, what: Callable[[], object] | str = "") -> T:
    """Wait until condition() is true, and return it. `what` describes the state if it does not come about."""
    began = monotonic()
    while True:
        waited = monotonic() - began
        if value := condition():
            return value
        assert waited < limit(seconds), f"waited {waited:.0f} s. {what if isinstance(what, str) else what()}"
        sleep(0.01)


def slowness() -> float:
    """How many times slower this machine is than the reference, 1 to AT_MOST: the worst of the last two minutes."""
    now = monotonic()
    if not _measured or now - _measured[-1][0] > MEASURE_EVERY_SEC:
        _measured.append((now, statistics.median(_probe_sec() for _ in range(3)) / REFERENCE_SEC))
        _measured[:] = [(at, value) for at, value in _measured if now - at <= REMEMBER_SEC]
    return min(max(1.0, max(value for _, value in _measured)), AT_MOST)


def _probe_sec() -> float:
    # posix_spawn: a test may have replaced what is in subprocess, and this is called in a signal handler as well.
    began = monotonic()
    try:
        os.waitpid(os.posix_spawn(_PROBE[0], _PROBE, {}), 0)
    except OSError:  # no memory or no process left: as busy as can be
        return AT_MOST * REFERENCE_SEC
    return monotonic() - began
