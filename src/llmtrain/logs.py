"""Log lines: to standard error and to a file, as tagged text or JSON. Results go to standard output, never here.

Tags people grep for: [DDP] [DATA] [TRAIN] [EVAL] [SAVE] [DONE]. A tag is the `tag` of a record:
`log("TRAIN", "step 10/100 ...")`.
"""

import errno
import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from llmtrain.env import DEBUG

logger = logging.getLogger("llmtrain")

_rank, _world_size = 0, 1


def set_rank(rank: int, world_size: int) -> None:
    """Which process of how many this is. Lines then carry the rank, and what every rank would say alike (anything
    below a warning) is left to rank 0 on standard error."""
    global _rank, _world_size
    _rank, _world_size = rank, world_size


def log(tag: str, text: str, level: int = logging.INFO, fields: dict[str, Any] | None = None) -> None:
    """One line `[TAG] text`; the fields are there for JSON output."""
    logger.log(level, text, extra={"tag": tag, "fields": fields or {}})


def log_on_every_rank(tag: str, text: str) -> None:
    """A line that also ranks other than 0 show."""
    logger.log(logging.INFO, text, extra={"tag": tag, "fields": {}, "on_every_rank": True})


def warn(tag: str, text: str) -> None:
    log(tag, f"warning: {text}", logging.WARNING)


def warn_once(tag: str, text: str) -> None:
    """What is true of the whole run: rank 0 says it for all."""
    if not _rank:
        warn(tag, text)


class _LoggingConfig(Protocol):
    """The config's logging section."""

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
            **({"rank": _rank} if _world_size > 1 else {}),
            **getattr(record, "fields", {}),
        }
        return json.dumps(line)


class _Stderr(logging.StreamHandler[Any]):
    """Standard error as it is now (tests and terminals swap it), with the progress bar moved out of the way."""

    def __init__(self, all_ranks: bool) -> None:
        super().__init__()
        self._all_ranks = all_ranks

    def emit(self, record: logging.LogRecord) -> None:
        is_left_to_rank0 = not self._all_ranks and not getattr(record, "on_every_rank", False)
        if _rank and record.levelno == logging.INFO and is_left_to_rank0:
            return
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        if not isinstance(sys.exc_info()[1], OSError):  # it goes to a file on a full disk, or nobody reads it any more
            super().handleError(record)


class _LogFile(logging.Handler):
    """A file that may be on a full disk: lines that do not fit are dropped, and that is said once. Each line is one
    write, so that none is left half-written in a buffer that can never be flushed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._is_failing = self._is_torn = False

    def emit(self, record: logging.LogRecord) -> None:
        line = f"{self.format(record)}\n".encode(errors="replace")
        try:
            written = self._file.write(b"\n" + line if self._is_torn else line)
        except OSError as problem:
            self._say(problem.strerror or str(problem))
        else:
            self._is_torn = written < len(line)
            if self._is_torn:
                self._say(os.strerror(errno.ENOSPC))

    def close(self) -> None:
        with suppress(OSError):  # some storage reports only here that it is full
            self._file.close()
        super().close()

    def _say(self, why: str) -> None:
        if not self._is_failing:
            self._is_failing = True  # first: what follows comes back here
            warn("TRAIN", f"{self._path} cannot be written ({why}); lines that do not fit are only shown here")


def setup_logging(config: _LoggingConfig, file: Path | None = None) -> None:
    """Send llmtrain's lines to standard error and, when given, to a file. Calling it again replaces both."""
    close_logging()
    logger.setLevel(logging.DEBUG if is_debugging() else config.level)
    logger.propagate = False
    console = _Stderr(config.all_ranks)
    console.setFormatter(_JsonFormatter() if config.json_output else _TaggedFormatter())
    logger.addHandler(console)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(file)
        handler.setFormatter(_JsonFormatter() if config.json_output else _TimedFormatter())
        logger.addHandler(handler)


def console_handler() -> logging.Handler | None:
    """The handler that writes to standard error, for a display that takes the terminal over for a while."""
    return next((h for h in logger.handlers if isinstance(h, _Stderr)), None)


def is_debugging() -> bool:
    """LLMTRAIN_DEBUG=1: every decision of the start-up is logged. Where it is not set, the names that other guides use
    for this count."""
    values = (os.environ.get(name) for name in (DEBUG, "COLOSSALAI_DEBUG", "DEBUG_DISTRIBUTED"))
    return next((value for value in values if value), "0") == "1"


def close_logging() -> None:
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
