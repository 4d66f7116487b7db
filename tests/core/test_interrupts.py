"""Ctrl-C at any moment: one line, the right exit code, never a traceback."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fork_server import IN_BACKGROUND
from limits import wait_until
from llmtrain.core.interrupts import is_importing
from llmtrain.errors import Interrupted
from llmtrain.training.shutdown import StopFlag

# As the console script does, after telling the test that the interpreter has started.
PROGRAM = "print('started', flush=True); from llmtrain.__main__ import main; main()"
# A module whose import takes long, as that of torch does. As there, an exception may not pass through.
SLOW_MODULE = """
import os, time
os.rename("waiting", "there")
try:
    time.sleep(60)
except BaseException:
    os._exit(134)
"""
IN_LOOP = """
import os, signal, sys
from llmtrain.training.shutdown import StopFlag
with StopFlag() as stop:
    stop.remedy = "Resume with: x"
    stop.before_leaving = lambda: print("left", flush=True)
    if "loop" in sys.argv:
        stop.enter_loop()
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
    print(stop.requested)
"""


def start(directory: Path, *words: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words],
        cwd=directory,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupted_import(directory: Path, module: str, *words: str) -> tuple[int, list[str]]:
    """Exit code and lines on standard error of a command that gets Ctrl-C while it imports a module."""
    (directory / f"{module}.py").write_text(SLOW_MODULE)
    (directory / "waiting").touch()
    one = start(directory, *words)
    try:
        wait_until(lambda: (directory / "there").exists() or one.poll() is not None)
        assert one.poll() is None, one.communicate()
        one.send_signal(signal.SIGINT)
        _, err = one.communicate()
    finally:
        one.kill()
    return one.returncode, err.splitlines()


@pytest.mark.parametrize("command", ["train", "runs"])
def test_interrupt_while_the_command_line_is_imported(tmp_path: Path, command: str) -> None:
    code, lines = interrupted_import(tmp_path, "typer", command)
    assert (code, len(lines)) == (130, 1), lines


def test_interrupt_while_torch_is_imported(tmp_path: Path) -> None:
    """Also: start-up says what it does before torch is imported."""
    code, lines = interrupted_import(tmp_path, "torch", "train", "--config", "gpt_smoke")
    assert code == 75, lines
    assert [line.startswith("[SETUP] ") for line in lines] == [True, False], lines


def stop_flag(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", IN_LOOP, *words], capture_output=True, text=True, check=False)


def test_first_interrupt_in_the_loop_sets_the_flag() -> None:
    done = stop_flag("1", "loop")
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_second_interrupt_leaves_at_once() -> None:
    done = stop_flag("2", "loop")
    assert (done.returncode, done.stdout) == (75, "left\n"), done.stderr
    assert done.stderr.splitlines()[-1].endswith("Resume with: x")
    assert "Traceback" not in done.stderr


def test_is_importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asks_while_imported.py").write_text(
        "from llmtrain.core.interrupts import is_importing\nanswer = is_importing()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("asks_while_imported").answer
    assert not is_importing()


def test_interrupt_after_the_command_is_ignored(tmp_path: Path) -> None:
    """While the interpreter exits, where torch's atexit callbacks would print a KeyboardInterrupt."""
    program = f"""
import atexit, os, signal
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
{PROGRAM}
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "presets"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_little_is_imported_before_interrupts_are_handled() -> None:
    """A Ctrl-C prints a traceback until then."""
    program = (
        "import sys; before = set(sys.modules); import llmtrain.core.interrupts; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"ast", "pkgutil"} & set(done.stdout.split())


def test_interrupt_that_an_extension_turns_into_an_error() -> None:
    """pydantic raises a SchemaError if its code is interrupted while it builds a serializer."""

    def extension() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        except BaseException as problem:
            raise ValueError(str(problem)) from None

    with pytest.raises(Interrupted), StopFlag():
        extension()


def test_tests_that_send_signals_pass_under_nohup(repo: Path, tmp_path: Path) -> None:
    """What tests start does not inherit that SIGINT is ignored."""
    words = ["-p", "no:cacheprovider", "-n", "1", f"--basetemp={tmp_path / 'tmp'}"]
    test = f"{__file__}::{test_first_interrupt_in_the_loop_sets_the_flag.__name__}"
    command = [*IN_BACKGROUND, sys.executable, "-m", "pytest", *words, test]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_interrupt_at_any_moment_of_the_first_two_seconds(tmp_path: Path, tiny: list[str]) -> None:
    """Of a real run. (Before its first line runs, the interpreter itself would print a traceback.)"""
    sets = [part for text in (*tiny, "trainer.max_steps=100000") for part in ("--set", text)]
    for number in range(1, 21):
        one = start(tmp_path, "train", "--config", "gpt_smoke", *sets)
        assert one.stdout is not None
        assert one.stdout.readline() == "started\n"
        time.sleep(number / 10)
        one.send_signal(signal.SIGINT)
        _, err = one.communicate()
        assert "Traceback" not in err, f"{number / 10} s: {err}"
        assert "Exception ignored" not in err, f"{number / 10} s: {err}"
        assert one.returncode in (75, 130), f"{number / 10} s: {err}"
