"""Which signals stop a process, and Ctrl-C outside a training run: no traceback, whenever it comes.

While modules are imported, which for torch takes seconds, an exception raised by a signal handler prints a traceback or
aborts inside C++ (exit code 134). There is nothing to save yet, so the process ends inside the handler. Later a
command gets KeyboardInterrupt as usual, and after its end Ctrl-C is ignored: torch's atexit callbacks would print it.

Imported before everything else, so it imports next to nothing.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGINT
_is_running = False


def is_ignored(number: int) -> bool:
    """Whether the parent asked to ignore a signal: `nohup` SIGHUP, `&` in a script SIGINT and SIGQUIT. They stay
    ignored, as in any other program: a Ctrl-C for the script, or the end of the login, must not stop the process."""
    return signal.getsignal(number) is signal.SIG_IGN


def stop_signals() -> list[signal.Signals]:
    """Signals that stop a process in an orderly way: SIGTERM, Ctrl-C, and the end of its terminal."""
    return [signal.SIGTERM, *(number for number in (signal.SIGINT, signal.SIGHUP) if not is_ignored(number))]


def handle_sigint() -> None:
    """From here on Ctrl-C ends the process with one line; called by the entry point, before other imports."""
    if not is_ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, _handle)


def command_starts() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, except during an import."""
    global _is_running
    _is_running = True


def command_ended() -> None:
    if signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_importing() -> bool:
    """Whether a module is being imported at this moment, in any thread."""
    specs = (getattr(module, "__spec__", None) for module in list(sys.modules.values()))
    return any(getattr(spec, "_initializing", False) for spec in specs)


def leave_at_once(text: str, exit_code: int, keeps_line: bool = False) -> NoReturn:
    """End the process inside a signal handler, with one line on standard error, bypassing its buffer, which may be in
    use. In a terminal it replaces the current line, which is a live one, or follows it (`keeps_line`)."""
    start = ("\n" if keeps_line else "\r\x1b[2K") if os.isatty(2) else ""
    with suppress(OSError):
        os.write(2, f"{start}{text}\n".encode())
    os._exit(exit_code)


def _handle(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    if _is_running and not is_importing():
        raise KeyboardInterrupt
    leave_at_once("Interrupted.", EXIT_CODE)
