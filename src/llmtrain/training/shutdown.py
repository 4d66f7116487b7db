"""SIGTERM and Ctrl-C.

While a run is being set up there is nothing to save, so a signal ends it immediately. Once the loop runs, a signal only
sets a flag, and the loop saves and exits at the next safe point. Either way the run ends as Interrupted.

While ranks are joining, the process exits inside the handler: torch calls back into Python while it connects, and an
exception raised there would pass through C++ that aborts on it (exit code 134).
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from llmtrain.errors import Interrupted
from llmtrain.logs import warn
from llmtrain.runs.exit_report import exit_now


class _SetupInterrupted(BaseException):
    """Not an Exception, so that no handler on the way out takes it for an error."""


class StopFlag:
    """Handles the two signals while entered. A second Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False
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
            raise KeyboardInterrupt
        self.requested = True
        action = "saving and stopping" if self._in_loop and self._saves else "stopping"
        warn("TRAIN", f"{signal.Signals(number).name}: {action}")
        if self._in_loop:
            return
        if self._is_joining:
            exit_now(_interrupted_in_setup())
        raise _SetupInterrupted


def _interrupted_in_setup() -> Interrupted:
    return Interrupted("Interrupted before training began.", remedy="Run the same command again.")
