"""SIGTERM, Ctrl-C, and SIGHUP, which the end of a terminal sends.

While a run is being set up there is nothing to save, so a signal ends it immediately. Once the loop runs, a signal only
sets a flag, and the loop saves and exits at the next safe point: in loop.py, the ranks agree on it in
`Trainer._exchange` and save in `_save_and_exit`. Either way the run ends as Interrupted. A second Ctrl-C ends the
process at once, without saving.

While ranks are joining, and during imports, the process exits inside the handler: torch calls back into Python there,
and an exception would pass through C++ that aborts on it (exit code 134).

Python runs signal handlers in the main thread only. In any other thread none are installed, and a training is stopped
with an event of the caller's. Inside a program of the user's the process never exits in a handler, unless ranks are
joining.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Protocol

from llmtrain.core.interrupts import is_importing, leave_at_once, stop_signals
from llmtrain.core.logs import warn
from llmtrain.core.progress import is_rank0
from llmtrain.errors import Interrupted, PeerLost
from llmtrain.runs.exit_report import exit_now, has_crashed_peer, write_exit_report


class StopEvent(Protocol):
    """Signals a loop to stop: a threading.Event or a StopFlag."""

    def is_set(self) -> bool: ...


class _SetupInterrupted(BaseException):
    """Not an Exception, so that no handler on the way out takes it for an error."""


class StopFlag:
    """Handles the signals while entered, in the main thread; `event` stops as the first signal does. `may_exit`:
    the process belongs to a command, so that a second Ctrl-C and one during an import may end it."""

    def __init__(self, event: StopEvent | None = None, may_exit: bool = True) -> None:
        self._event = event
        self._may_exit = may_exit
        self.received: int | None = None
        """Number of the last signal."""
        self.show: Callable[[str], None] | None = None
        """Shows what is being done about the signal; None: a log line does."""
        self.before_leaving: Callable[[], None] = lambda: None
        """Called when a signal ends the process inside the handler, with the loop or without."""
        self.remedy = "Run the same command again."
        self.interrupted = "Interrupted before training began."
        """Says what did not happen, for a signal that comes before `enter_loop`."""
        self._is_joining = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        self._in_loop = False
        self._saves = True
        self._previous_handlers: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.received is not None or (self._event is not None and self._event.is_set())

    def is_set(self) -> bool:
        """Same as `requested`, under the name that threading.Event has."""
        return self.requested

    def joined(self) -> None:
        """All ranks are connected: from here on a signal raises an exception, so that resources are released."""
        self._is_joining = False
        self._raise_if_requested()

    def enter_loop(self, saves: bool = True) -> None:
        """From here on a signal only sets `requested`; the loop must check it."""
        self._in_loop = True
        self._saves = saves
        self._raise_if_requested()

    def _raise_if_requested(self) -> None:
        if self.requested:  # by the event, or the exception of the handler was lost, as in a destructor
            raise _SetupInterrupted

    def __enter__(self) -> "StopFlag":
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, _SetupInterrupted) or self._was_replaced(error):
            raise self._interrupted_in_setup() from None

    def _was_replaced(self, error: BaseException | None) -> bool:
        """Whether an error took the place of the handler's exception: code of a C extension, such as pydantic's, turns
        what is raised in it into an error of its own."""
        is_in_setup = self.received is not None and not self._in_loop
        return is_in_setup and isinstance(error, Exception) and not isinstance(error, Interrupted)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # Under a launcher one Ctrl-C arrives twice: from the terminal and from the launcher.
        has_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        if self.received is not None and number == signal.SIGINT and not has_launcher:
            self._leave_without_saving()
        self.received = number
        self._announce(signal.Signals(number).name)
        if self._in_loop:
            return  # the loop checks `requested`
        if self._is_joining:
            exit_now(self._interrupted_in_setup())
        if not is_importing():
            raise _SetupInterrupted
        if self._may_exit:
            error = self._interrupted_in_setup()
            with suppress(Exception):
                self.before_leaving()
            write_exit_report(error)
            leave_at_once(f"{error.what} {error.remedy}", error.exit_code)
        # Else `joined` or `enter_loop` raises, after the import.

    def _interrupted_in_setup(self) -> Interrupted:
        if has_crashed_peer():  # counts as a crash
            return PeerLost(
                "Another process of this node crashed before training began.", remedy="See its error above."
            )
        return Interrupted(self.interrupted, remedy="Run the same command again.")

    def _announce(self, name: str) -> None:
        """Show what happens now. During the setup that is the error itself, at once."""
        action = "stopping"
        if self._in_loop and self._saves:
            action = "saving and stopping"
        if self._in_loop and self.show is not None:
            self.show(action)
        elif (self._in_loop or self._is_joining) and not _is_below_bar():
            warn("TRAIN", f"{name}: {action}")

    def _leave_without_saving(self) -> None:
        if not self._may_exit or (self._in_loop and not self._saves):
            raise KeyboardInterrupt
        error = Interrupted("Interrupted twice: stopped at once, without saving.", remedy=self.remedy)
        with suppress(Exception):  # whatever was going on: the process ends now
            self.before_leaving()
            write_exit_report(error)
        leave_at_once(f"{error.what} {error.remedy}", error.exit_code, keeps_line=True)


def _is_below_bar() -> bool:
    """Whether this process shares a terminal with rank 0, which shows what happens."""
    return sys.stderr.isatty() and not is_rank0()
