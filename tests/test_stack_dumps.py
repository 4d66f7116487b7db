"""A test that hangs fails alone; the tests after it run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HANGING = """
import time
import pytest

@pytest.fixture
def hangs_afterwards():
    yield
    time.sleep(1000)

@pytest.mark.parametrize("number", range(2))
def test_hangs(number):
    time.sleep(1000)

def test_fails_and_then_hangs(hangs_afterwards):
    assert False
"""
# A mutex is locked again after a signal, so Python's handler never runs. PyDLL: other threads cannot run either.
HANGING_FOR_GOOD = """
import ctypes, time

def test_hangs_in_c():
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)

def test_catches_the_exception():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
"""
PASSING = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_passes(number):
    pass
"""


# Becomes busy while the first test runs.
BUSY = """
import limits
speeds = iter([0.05] * 3)
limits.MEASURE_EVERY_SEC = 0.1
limits._probe_sec = lambda: next(speeds, 0.3)
"""


def run_pytest(folder: Path, *words: str, **files: str) -> tuple[int, dict[str, int]]:
    """The exit code, and how many tests passed and failed."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    plugins = [word for name in ("xdist", "pytest_timeout", "stack_dumps") for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", "--timeout", "0.5", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    counts = re.findall(r"(\d+) (passed|failed|error)", done.stdout.splitlines()[-1])
    return done.returncode, {word: int(number) for number, word in counts}


def test_hung_test_fails_alone(tmp_path: Path) -> None:
    ended = run_pytest(tmp_path, test_a=HANGING, test_b=PASSING)
    assert ended == (1, {"passed": 20, "failed": 3, "error": 1})


@pytest.mark.slow
def test_test_that_cannot_be_interrupted_fails_alone(tmp_path: Path) -> None:
    """It ends its worker, which is replaced."""
    ended = run_pytest(tmp_path, "-n", "2", test_a=HANGING_FOR_GOOD, test_b=HANGING, test_c=PASSING)
    assert ended == (1, {"passed": 20, "failed": 5, "error": 1})


def test_limit_of_a_test_grows_while_the_machine_is_busy(tmp_path: Path) -> None:
    takes_a_second = "import time\ndef test_it(): time.sleep(1)"
    assert run_pytest(tmp_path, conftest=BUSY, test_a=takes_a_second) == (0, {"passed": 1})
