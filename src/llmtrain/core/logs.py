"""Log lines to standard error and to a file, as tagged text or JSON. Results go to standard output, never here.

Tags: [SETUP] [DDP] [DATA] [TRAIN] [EVAL] [SAMPLE] [EPOCH] [SAVE] [DONE]. `log("TRAIN", "step 10/100")` prints
`[TRAIN] step 10/100`.
"""

import errno
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from llmtrain.core.env import DEBUG
from llmtrain.core.terminal import color, fit_line, has_color, printable, stream_width

logger = logging.getLogger("llmtrain")
_TAGGED = re.compile(r"\[([A-Z]+\d*)\] (.*)")
_RANK = re.compile(r"^(\[rank \d+\] |rank \d+: )")

_HEAD_WIDTH = len("[SAMPLE]")

_rank = 0
_world_size = 1
_is_quiet = False


def set_rank(rank: int, world_size: int) -> None:
    """Set the rank of this process. Lines of other ranks than 0 start with the rank, and their INFO lines are not shown
    on standard error."""
    global _rank, _world_size
    _rank = rank
    _world_size = world_size


def set_quiet(is_quiet: bool) -> None:
    """Whether standard error shows only warnings and errors; log files are not affected."""
    global _is_quiet
    _is_quiet = is_quiet


def log(
    tag: str, text: str, level: int = logging.INFO, fields: dict[str, Any] | None = None, good_news: str = ""
) -> None:
    """Log one line `[TAG] text`; `fields` are added to JSON output. The text may quote a file: see printable.
    `good_news`: the end of the text, which is green in a terminal."""
    text = printable(text)
    if level >= logging.WARNING:  # may quote the error of a library, which has the URL it could not reach
        from llmtrain.core.redact import redact  # compiling its patterns takes longer than `llmtrain --help` may

        text = redact(text)
    logger.log(level, text, extra={"tag": tag, "fields": fields or {}, "good_news": good_news})


def log_on_every_rank(tag: str, text: str) -> None:
    """Log a line that is also shown on ranks other than 0."""
    logger.log(logging.INFO, text, extra={"tag": tag, "fields": {}, "on_every_rank": True})


def warn(tag: str, text: str) -> None:
    log(tag, f"warning: {text}", logging.WARNING)


def warn_once(tag: str, text: str) -> None:
    """Warn on rank 0 only, about something that holds for the whole run."""
    if not _rank:
        warn(tag, text)


class _LoggingConfig(Protocol):
    """The logging section of a config."""

    @property
    def level(self) -> str: ...
    @property
    def json_output(self) -> bool: ...
    @property
    def all_ranks(self) -> bool: ...


class _TaggedFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        tag = getattr(record, "tag", None)
        message = record.getMessage()
        if _rank:
            message = f"[rank {_rank}] {message}"
        return f"[{tag}] {message}" if tag else message


class _ConsoleFormatter(_TaggedFormatter):
    """Format of lines in a terminal: wrapped between words, with colored tags and warnings."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        width = stream_width(sys.stderr)
        if width is None:
            return text
        tag = getattr(record, "tag", None)
        head = f"[{tag}]" if tag else ""
        if head:  # so that the texts of all tags begin in one column
            text = f"{head:<{_HEAD_WIDTH}}{text.removeprefix(head)}"
        text = fit_line(text, width, indent=_HEAD_WIDTH + 1 if head else 0)
        if not has_color(sys.stderr):
            return text
        body = text.removeprefix(head)
        if record.levelno > logging.INFO:
            body = color(body, "red" if record.levelno >= logging.ERROR else "yellow")
        good_news = getattr(record, "good_news", "")
        if good_news and body.endswith(good_news):
            body = body.removesuffix(good_news) + color(good_news, "green")
        return color(head, "cyan") + body if head else body


class _TimedFormatter(_TaggedFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record, '%Y-%m-%d %H:%M:%S')} {super().format(record)}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "tag": getattr(record, "tag", None),
            "message": record.getMessage(),
        }
        if _world_size > 1:
            line["rank"] = _rank
        line |= getattr(record, "fields", {})
        return json.dumps(line)


class _Stderr(logging.StreamHandler[Any]):
    """The current sys.stderr, which tests and the progress bar replace."""

    def __init__(self, all_ranks: bool) -> None:
        super().__init__()
        self._all_ranks = all_ranks

    def emit(self, record: logging.LogRecord) -> None:
        is_rank0_only = not self._all_ranks and not getattr(record, "on_every_rank", False)
        if record.levelno == logging.INFO and (_is_quiet or (_rank and is_rank0_only)):
            return
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        # A file on a full disk, a closed pipe, or a signal handler that logs while a line is being written.
        if not isinstance(sys.exc_info()[1], OSError | RuntimeError):
            super().handleError(record)


class _LogFile(logging.Handler):
    """A log file that may be on a full disk: lines that do not fit are dropped, with one warning. Each line is one
    write, so that no partial line stays in a buffer that cannot be flushed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._is_failing = False
        self._is_torn = False
        """The last line was cut off, so the next one begins with a line break."""

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="replace")
        try:
            written = self._file.write(b"\n" + line if self._is_torn else line)
        except OSError as problem:
            self._warn(problem.strerror or str(problem))
        else:
            self._is_torn = written < len(line)
            if self._is_torn:
                self._warn(os.strerror(errno.ENOSPC))

    def close(self) -> None:
        with suppress(OSError):  # some file systems report only here that they are full
            self._file.close()
        super().close()

    def _warn(self, why: str) -> None:
        if not self._is_failing:
            self._is_failing = True  # before the warning, which is also written to this file
            warn("TRAIN", f"cannot write {self._path} ({why}); the missing log lines are only on standard error")


def setup_logging(config: _LoggingConfig, file: Path | None = None) -> None:
    """Log to standard error and optionally to a file. A second call replaces both."""
    close_logging()
    logger.setLevel(logging.DEBUG if is_debugging() else config.level)
    logger.propagate = False
    console = _Stderr(config.all_ranks)
    console.setFormatter(_JsonFormatter() if config.json_output else _ConsoleFormatter())
    logger.addHandler(console)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file)
        handler.setFormatter(_JsonFormatter() if config.json_output else _TimedFormatter())
        logger.addHandler(handler)


def log_errors_only() -> None:
    """For a process whose warnings another one shows as well."""
    logger.setLevel(logging.ERROR)


@contextmanager
def scoped_logging() -> Iterator[None]:
    """Log as setup_logging says inside the block, and as the program around it has configured afterwards."""
    level = logger.level
    propagates = logger.propagate
    try:
        yield
    finally:
        close_logging()
        logger.setLevel(level)
        logger.propagate = propagates


def console_handler() -> logging.Handler | None:
    """The handler for standard error, for a progress bar that filters its lines."""
    return next((h for h in logger.handlers if isinstance(h, _Stderr)), None)


def shows_info() -> bool:
    """Whether standard error shows INFO lines of this process, as text: then a live line may replace some of them."""
    handler = console_handler()
    is_text = handler is not None and isinstance(handler.formatter, _ConsoleFormatter)
    return is_text and not _rank and not _is_quiet and logger.isEnabledFor(logging.INFO)


def is_debugging() -> bool:
    """Whether LLMTRAIN_DEBUG=1 is set, else the variable that other guides use."""
    for name in (DEBUG, "COLOSSALAI_DEBUG", "DEBUG_DISTRIBUTED"):
        if value := os.environ.get(name):
            return value == "1"
    return False


def close_logging() -> None:
    """Remove the handlers of setup_logging; those of the program around it stay."""
    for handler in list(logger.handlers):
        if isinstance(handler, _Stderr | _LogFile):
            logger.removeHandler(handler)
            handler.close()


def split_line(line: str) -> tuple[str | None, str]:
    """(tag, text) of a log line, tagged or JSON."""
    if line.startswith("{"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return None, line
        return value.get("tag"), str(value.get("message", ""))
    tagged = _TAGGED.match(line)
    if tagged is None:
        return None, line
    return tagged[1], tagged[2]


def without_rank(text: str) -> str:
    """The text of a line or of an error message without the rank that it starts with."""
    return _RANK.sub("", text)
