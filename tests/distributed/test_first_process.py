"""`python -m llmtrain` as pid 1 of a container, which ignores signals without a handler."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from limits import limit, wait_until

# Simulates slow imports before a command installs its signal handler.
SLOW_IMPORT = """
import os, time
with open("there.new", "w") as file:
    file.write(str(os.getpid()))
os.rename("there.new", "there")
time.sleep(60)
"""


@contextmanager
def starting(directory: Path, *before: str, **env: str) -> Iterator["subprocess.Popen[bytes]"]:
    """llmtrain in the middle of its imports."""
    (directory / "typer.py").write_text(SLOW_IMPORT)
    kept = {name: value for name, value in os.environ.items() if name != "LLMTRAIN_EXIT_CODES"}
    one = subprocess.Popen(
        [*before, sys.executable, "-m", "llmtrain", "node"],
        cwd=directory,
        env={**kept, "PYTHONPATH": str(directory), **env},
        stderr=subprocess.PIPE,
    )
    try:
        wait_until(lambda: (directory / "there").exists() or one.poll() is not None, 20)
        if one.poll() is not None:
            _, output = one.communicate()
            if before and b"unshare" in output:
                pytest.skip(f"no namespaces here: {output.decode()}")
            raise AssertionError(output)
        yield one
    finally:
        one.kill()
        one.communicate()


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


@pytest.mark.needs_root
@pytest.mark.parametrize(("platform", "code"), [(None, 75), ("statefulset", 75), ("pytorchjob", 203)])
def test_sigterm_before_handler_as_pid_1(tmp_path: Path, platform: str | None, code: int) -> None:
    if os.geteuid():
        pytest.skip("only root may make a pid namespace")
    env = {"LLMTRAIN_EXIT_CODES": platform} if platform else {}
    with starting(tmp_path, "unshare", "--pid", "--fork", "--kill-child", **env) as one:
        assert (tmp_path / "there").read_text() == "1"
        os.kill(child_of(one.pid), signal.SIGTERM)
        assert one.wait(limit(5)) == code


def test_other_process_ends_by_signal(tmp_path: Path) -> None:
    with starting(tmp_path, LLMTRAIN_EXIT_CODES="pytorchjob") as one:
        assert int((tmp_path / "there").read_text()) == one.pid
        one.send_signal(signal.SIGTERM)
        assert one.wait(limit(5)) == -signal.SIGTERM
