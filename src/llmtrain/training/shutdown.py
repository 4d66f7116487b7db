"""Being told to stop: SIGTERM and Ctrl-C.

While a run is being set up there is nothing to save, so it ends at once. Once the loop runs, a signal only sets a
flag, and the loop saves and leaves at the next safe place. Either way the run ends as Interrupted.

A rank that is joining the others exits inside the handler: torch calls back into Python while it connects, and an
exception raised there goes through C++ that aborts on it (exit code 134).
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from llmtrain.errors import Interrupted
from llmtrain.logs import warn
from llmtrain.runs.exit_report import exit_now


class _StopNow(BaseException):
    """Not an Exception: nothing on the way out may take it for an error of its own."""


class StopFlag:
    """Handles the two signals while entered. A second Ctrl-C ends the process whatever it is doing."""

    def __init__(self) -> None:
        self.requested = False
        self._is_joining = os.environ.get("WORLD_SIZE", "1") not in ("", "1")
        self._in_loop = False
        self._saves = True
        self._before: dict[int, Any] = {}

    def joined(self) -> None:
        """All ranks are connected: from here on a rank may hold what it has to put back."""
        self._is_joining = False

    def enter_loop(self, saves: bool = True) -> None:
        """From here on the loop looks at `requested` by itself."""
        self._in_loop, self._saves = True, saves

    def __enter__(self) -> "StopFlag":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if isinstance(error, _StopNow):
            raise _stopped() from None

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # Under a launcher one Ctrl-C comes twice: from the terminal, and from the launcher.
        if self.requested and number == signal.SIGINT and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        self.requested = True
        name = signal.Signals(number).name
        warn("TRAIN", f"{name}: {'saving and ' if self._in_loop and self._saves else ''}stopping")
        if self._in_loop:
            return
        if self._is_joining:
            exit_now(_stopped())
        raise _StopNow


def _stopped() -> Interrupted:
    return Interrupted("Stopped as told, before training began.", remedy="Run the same command again.")
