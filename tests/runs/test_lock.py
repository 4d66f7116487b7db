import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.errors import ResumeMe, UsageError
from llmtrain.runs import lock as lock_module
from llmtrain.runs.lock import STALE_AFTER_SEC, RunLock, is_held

HOLDER = """
import sys
from pathlib import Path
from llmtrain.runs.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "some-run"
    folder.mkdir()
    return folder / "lock"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def make_stale(path: Path) -> None:
    long_ago = time.time() - STALE_AFTER_SEC - 10
    os.utime(path, (long_ago, long_ago))


def test_it_is_held_inside_and_gone_after(path: Path) -> None:
    assert not is_held(path)
    with RunLock(path) as lock:
        assert is_held(path)
        lock.check()
    assert not is_held(path)
    assert not path.exists()


def test_it_is_given_back_after_an_error(path: Path) -> None:
    with pytest.raises(RuntimeError), RunLock(path):
        raise RuntimeError
    assert not path.exists()


def test_a_second_writer_is_refused_at_once(path: Path, holder: subprocess.Popen[str]) -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match=f"some-run.*process {holder.pid} on ") as caught, RunLock(path):
        pytest.fail("two writers")
    assert time.monotonic() - started < 5
    assert caught.value.exit_code == 64
    assert caught.value.remedy
    assert json.loads(path.read_text())["pid"] == holder.pid


def test_a_second_writer_in_the_same_process_is_refused(path: Path) -> None:
    with RunLock(path), pytest.raises(UsageError), RunLock(path):
        pytest.fail("two writers")


def test_a_killed_owner_is_replaced_at_once(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert path.exists()
    assert not is_held(path)
    with RunLock(path) as lock:
        lock.check()


def test_a_killed_owner_nobody_waited_for_is_replaced(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now, and stays one
    with RunLock(path) as lock:
        lock.check()


def test_a_stopped_owner_is_replaced_when_its_heartbeat_is_old(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(UsageError), RunLock(path):
        pytest.fail("the heartbeat was fresh")
    make_stale(path)
    with RunLock(path) as lock:
        holder.send_signal(signal.SIGCONT)
        holder.communicate()  # it ends in its own time, and must leave our lock alone
        lock.check()
        assert is_held(path)


def test_an_owner_that_was_replaced_may_publish_nothing(path: Path) -> None:
    first = RunLock(path)
    first.__enter__()
    make_stale(path)
    with RunLock(path) as second:
        with pytest.raises(ResumeMe) as caught:
            first.check()
        assert caught.value.exit_code == 75
        first.__exit__(None, None, None)
        second.check()


def test_a_later_process_with_the_same_number_is_not_the_owner(path: Path) -> None:
    """A restarted pod has the same host name and is process 1 again."""
    with RunLock(path):
        owner = json.loads(path.read_text())
    path.write_text(json.dumps({**owner, "process": "another boot:1"}))
    with RunLock(path) as lock:
        lock.check()


def test_an_owner_on_another_machine_counts_by_its_heartbeat(path: Path) -> None:
    path.write_text(json.dumps({"token": "x", "pid": 1, "host": "elsewhere", "process": "p"}))
    assert is_held(path)
    with pytest.raises(UsageError, match="elsewhere"), RunLock(path):
        pytest.fail("two writers")
    make_stale(path)
    with RunLock(path) as lock:
        lock.check()


@pytest.mark.parametrize("content", ["", "{", "null", "{}"])
def test_a_damaged_lock_is_no_lock(path: Path, content: str) -> None:
    path.write_text(content)
    with RunLock(path) as lock:
        lock.check()


def test_a_lock_somebody_removed_stops_the_owner(path: Path) -> None:
    with RunLock(path) as lock:
        path.unlink()
        with pytest.raises(ResumeMe):
            lock.check()


def test_the_heartbeat_keeps_it_fresh(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SEC", 0.02)
    with RunLock(path):
        make_stale(path)
        deadline = time.monotonic() + 5
        while time.time() - path.stat().st_mtime > STALE_AFTER_SEC and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_held(path)


def test_two_that_start_at_once_get_one_lock(path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    said = []
    for process in processes:
        assert process.stdout
        said.append(process.stdout.readline())  # empty when it was refused and ended
    for process in processes:
        process.communicate()
    assert sorted(said) == ["", "held\n"]
