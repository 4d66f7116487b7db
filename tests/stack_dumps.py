"""A test that hangs fails alone, and the others run.

pytest-timeout raises an exception in a test that takes too long. That does not end a test that hangs in C or catches
the exception, nor fixtures that hang after a test has failed. So its timer is set here: the limit grows while the
machine is busy (limits.py), it holds again after a failure, and a test that continues nevertheless ends its process.
xdist reports that test as failed and starts another worker; without xdist the run ends.
"""

import faulthandler
import signal
from time import monotonic
from types import FrameType

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key  # the standard error of pytest, which is not captured
from pytest_timeout import Settings, is_debugging, timeout_sigalrm

from limits import limit

GRACE_SEC = 60.0
"""For a test that got the exception, to stop what it has started."""
_settings = pytest.StashKey[Settings]()


@pytest.hookimpl
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> bool | None:
    if settings.method != "signal":
        return None  # pytest-timeout sets its own
    began = monotonic()
    item.stash[_settings] = settings

    def left() -> float:
        return began + limit(settings.timeout) - monotonic()

    def start(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if not is_debugging():
            at_last = seconds + limit(min(GRACE_SEC, settings.timeout))
            faulthandler.dump_traceback_later(at_last, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])

    def expire(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        __tracebackhide__ = True
        if (more := left()) > 0:  # the machine has become busy meanwhile
            start(more)
        else:
            timeout_sigalrm(item, settings._replace(timeout=round(monotonic() - began, 1)))

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.cancel_dump_traceback_later()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # called by pytest-timeout
    signal.signal(signal.SIGALRM, expire)
    start(left())
    return True


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """pytest-timeout has stopped its timer, for debuggers, and the teardown follows."""
    if _settings in node.stash and not node.config.getoption("usepdb"):
        pytest_timeout_set_timer(node, node.stash[_settings])  # type: ignore[arg-type]
