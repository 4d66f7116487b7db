"""What a command is doing, on standard error: one live line in a terminal or notebook, tagged log lines elsewhere.

phase("loading torch")        the live line shows the phase and its seconds; a log gets `[SETUP] loading torch`
detail("12 MB, 3 MB/s")       more about the phase, on the live line only
end_phases(is_ready=True)     removes the live line; a terminal gets one line with the time of each phase
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from llmtrain.core.logs import log, set_quiet, shows_info

if TYPE_CHECKING:
    from rich.text import Text

ProgressMode = Literal["auto", "bar", "log", "none"]
"""How a run shows its progress. auto: a bar in a terminal or notebook, else log lines; none: warnings only."""
UPDATES_PER_SECOND = 10
Render = Callable[[int], "Text"]
"""The live line, at most this wide."""

_mode: ProgressMode = "auto"


@contextmanager
def progress_mode(mode: ProgressMode) -> Iterator[None]:
    """Show progress in this way inside the block."""
    global _mode
    before = _mode
    _mode = mode
    set_quiet(mode == "none")
    try:
        yield
    finally:
        end_phases()
        _mode = before
        set_quiet(before == "none")


def is_live() -> bool:
    """Whether progress is a live line rather than log lines."""
    if _mode in ("log", "none") or not shows_info() or not is_rank0():
        return False
    return _mode == "bar" or sys.stderr.isatty() or _has_widgets()


def is_notebook() -> bool:
    """Whether progress is also shown as a curve: in a notebook, unless log lines were asked for."""
    return _mode not in ("log", "none") and shows_info() and is_rank0() and "ipykernel" in sys.modules


def is_rank0() -> bool:
    """Whether the environment says rank 0: before the processes have joined, the rank is not known otherwise."""
    return os.environ.get("RANK", "0") in ("", "0")


def _has_widgets() -> bool:
    """Whether a live line works in this notebook: rich draws it with ipywidgets."""
    return "ipykernel" in sys.modules and find_spec("ipywidgets") is not None


class LiveLine:
    """A line below all other output, redrawn by a thread until `stop`. Lines logged meanwhile appear above it."""

    def __init__(self, render: Render, is_transient: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        class _Console(Console):
            def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002
                """Never hidden: a process that is killed could not show it again."""
                return False

        class _Line:
            def __rich_console__(self, console: Console, options: Any) -> Iterator["Text"]:
                yield render(options.max_width)

        self._live = Live(
            _Line(),
            console=_Console(stderr=True),
            refresh_per_second=UPDATES_PER_SECOND,
            transient=is_transient,
            redirect_stdout=False,
        )
        self._live.start()

    def stop(self) -> None:
        self._live.stop()


class _Phases:
    def __init__(self) -> None:
        self._line: LiveLine | None = None
        self._started = 0.0
        self._began = 0.0
        self._ended: list[tuple[str, float]] = []
        self._current = ""
        self._detail = ""

    def begin(self, what: str) -> None:
        now = time.monotonic()
        if not self._current:
            self._started = now
            self._ended = []
        self._end_current(now)
        self._current = what
        self._detail = ""
        self._began = now
        if is_live():
            self._line = self._line or self._show_line()
        elif is_rank0():
            log("SETUP", f"{now - self._started:.1f} s: {what}" if self._ended else what)

    def _show_line(self) -> LiveLine:
        if sys.stderr.isatty():
            # Shown before rich is imported; the live line starts at the same column.
            print(self._current, end="\r", file=sys.stderr, flush=True)
        return LiveLine(self._render, is_transient=True)

    def detail(self, text: str) -> bool:
        self._detail = text
        return self._line is not None

    def seconds(self) -> dict[str, float]:
        return dict(self._ended)

    def end(self, is_ready: bool) -> None:
        self._end_current(time.monotonic())
        self._current = ""
        if self._line is None:
            return
        self._line.stop()
        self._line = None
        if is_ready:
            total = sum(seconds for _, seconds in self._ended)
            log("SETUP", f"{total:.1f} s: " + ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._ended))

    def _end_current(self, now: float) -> None:
        if self._current:
            self._ended.append((self._current, now - self._began))

    def _render(self, width: int) -> "Text":
        from rich.text import Text

        seconds = f"{time.monotonic() - self._began:.1f} s"
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(self._current, "bold").append(f" {self._detail} {seconds}" if self._detail else f" {seconds}")
        text.truncate(width, overflow="ellipsis")
        return text


_phases = _Phases()


def phase(what: str) -> None:
    """Begin a phase of starting up; it ends the one before."""
    _phases.begin(what)


def detail(text: str) -> bool:
    """Show more about the current phase. Returns whether a live line shows it; if not, the caller may log it."""
    return _phases.detail(text)


def end_phases(is_ready: bool = False) -> None:
    """Remove the live line. `is_ready`: the command has started up, rather than failed."""
    _phases.end(is_ready)


def phase_seconds() -> dict[str, float]:
    """The phases of the last start, and what each took."""
    return _phases.seconds()


@contextmanager
def phases(first: str) -> Iterator[None]:
    """Begin the first phase; whatever happens, no live line is left after the block."""
    phase(first)
    try:
        yield
    finally:
        end_phases()
