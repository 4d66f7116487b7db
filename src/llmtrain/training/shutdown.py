"""SIGTERM and Ctrl-C.

While a run is being set up there is nothing to save, so a signal ends it immediately. Once the loop runs, a signal only
sets a flag, and the loop saves and exits at the next safe point. Either way the run ends as Interrupted. A second
Ctrl-C ends the process at once, without saving.

While ranks are joining, and during imports, the process exits inside the handler: torch calls back into Python there,
and an exception would pass through C++ that aborts on it (exit code 134).
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from llmtrain.errors import Interrupted
from llmtrain.interrupts import is_importing, leave_at_once
from llmtrain.logs import warn
from llmtrain.runs.exit_report import exit_now, write_exit_report


class _SetupInterrupted(BaseException):
    """Not an Exception, so that no handler on the way out takes it for an error."""


class StopFlag:
    """Handles the two signals while entered."""

    def __init__(self) -> None:
        self.requested = False
        self.show: Callable[[str], None] | None = None
        """Shows what is being done about the signal; None: a log line does."""
        self.before_leaving: Callable[[], None] = lambda: None
        """Called when a second Ctrl-C ends the process."""
        self.remedy = "Run the same command again."
        self._is_joining = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        self._in_loop = False
        self._saves = True
        self._previous_handlers: dict[int, Any] = {}

    def joined(self) -> None:
        """All ranks are connected: from here on a signal raises an exception, so that resources are released."""
        self._is_joining = False

    def enter_loop(self, saves: bool = True) -> None:
        """From here on a signal only sets `requested`; the loop must check it."""
        self._in_loop, self._saves = True, saves
        if self.requested:  # the exception of the handler was lost, as in a destructor
            raise _SetupInterrupted

    def __enter__(self) -> "StopFlag":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        if isinstance(error, _SetupInterrupted):
            raise _interrupted_in_setup() from None

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # Under a launcher one Ctrl-C arrives twice: from the terminal and from the launcher.
        if self.requested and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            self._leave_without_saving()
        self.requested = True
        action = "saving and stopping" if self._in_loop and self._saves else "stopping"
        if self._in_loop and self.show is not None:
            self.show(action)
        elif (self._in_loop or self._is_joining) and not _is_below_bar():
            warn("TRAIN", f"{signal.Signals(number).name}: {action}")
        if self._in_loop:
            return
        if self._is_joining:
            exit_now(_interrupted_in_setup())
        if is_importing():
            error = _interrupted_in_setup()
            write_exit_report(error)
            leave_at_once(f"{error.what} {error.remedy}", error.exit_code)
        raise _SetupInterrupted

    def _leave_without_saving(self) -> None:
        if self._in_loop and not self._saves:
            raise KeyboardInterrupt
        error = Interrupted("Interrupted twice: stopped at once, without saving.", remedy=self.remedy)
        with suppress(Exception):  # whatever was going on: the process ends now
            self.before_leaving()
            write_exit_report(error)
        leave_at_once(f"{error.what} {error.remedy}", error.exit_code, keeps_line=True)


def _is_below_bar() -> bool:
    """Whether this process shares a terminal with rank 0, which shows what happens."""
    return sys.stderr.isatty() and os.environ.get("RANK", "0") not in ("", "0")


def _interrupted_in_setup() -> Interrupted:
    return Interrupted("Interrupted before training began.", remedy="Run the same command again.")
