"""Child processes for tests, forked from a server that has imported torch but never computed with it.

    process = fork_server.start(body)    # body() returns an exit code; any function, also a lambda

A process whose threads have started must not fork: a lock or a barrier that another thread holds is never released in
the child. pytest's own process has threads (xdist, and every test that computed something), so it never forks; the
server has one, and every child checks that.
"""

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import cloudpickle

TESTS = Path(__file__).parent
CRASHED = 1
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""For the server, before it imports numpy, torch and, on x86_64, pyarrow: they would start threads."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["fork_server_preload"])
# As conftest left it, whatever a test has changed when the server starts.
_environment = dict(os.environ)
_started: list[BaseProcess] = []


def start(body: Callable[[], int]) -> BaseProcess:
    """A child with this process's environment and current directory, which ends with the exit code of body()."""
    _pickle_tests_by_value()
    process = _context.Process(target=_child, args=(dict(os.environ), cloudpickle.dumps(body)))
    with _server_environment():
        process.start()
    _started.append(process)
    return process


@atexit.register
def _end_all() -> None:
    """multiprocessing waits for its children at the end of the interpreter: not for those of a failed test."""
    for process in _started:
        end(process)


def end(process: BaseProcess) -> None:
    """Kill it, unless it has ended: the server has waited for it then, and its number may be another process's."""
    if process.exitcode is None:
        process.kill()
        process.join()


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped with SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


IN_BACKGROUND = ["sh", "-c", 'trap "" INT HUP; exec "$@"', "sh"]
"""Before a command: start it as `nohup command &` in a script does, with SIGINT and SIGHUP ignored."""


def ignore_as_in_background() -> None:
    """The same, called in a child."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def redirect(out: Path, err: Path) -> None:
    """Write standard output and error to files; in a child."""
    for descriptor, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def _child(environment: dict[str, str], pickled: bytes) -> None:
    code = CRASHED
    try:
        from fork_server_preload import threads_at_fork

        assert threads_at_fork == 1, f"forked from a process with {threads_at_fork} threads"
        os.environ.clear()
        os.environ.update(environment)
        code = cloudpickle.loads(pickled)()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def _server_environment() -> Iterator[None]:
    """The first child starts the server, which inherits this."""
    changed = dict(os.environ)
    os.environ.clear()
    path = os.pathsep.join(filter(None, (str(TESTS), _environment.get("PYTHONPATH"))))
    os.environ.update(_environment, **ONE_THREAD, PYTHONPATH=path)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(changed)


@functools.cache
def _register(name: str) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[name])


def _pickle_tests_by_value() -> None:
    """pytest's importlib mode gives test modules names that a child cannot import."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.is_relative_to(TESTS) and file.name.startswith(("test_", "conftest")):
            _register(name)
