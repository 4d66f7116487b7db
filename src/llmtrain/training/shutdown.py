"""Being told to stop: SIGTERM and Ctrl-C set a flag, and the loop saves and leaves at the next safe place."""

import signal
from types import FrameType, TracebackType
from typing import Any

from llmtrain.logs import warn


class StopFlag:
    """While entered, SIGTERM and SIGINT only set the flag; a second Ctrl-C ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopFlag":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        warn("TRAIN", f"{signal.Signals(number).name}: saving and stopping")
