import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limits import limit, wait_until
from llmtrain.errors import Interrupted, PeerLost, Superseded, UsageError
from llmtrain.runs import lock as lock_module
from llmtrain.runs.lock import STALE_AFTER_SEC, RunLock, is_held

HOLDER = """
import sys
from pathlib import Path
from llmtrain.runs import lock
lock.HEARTBEAT_SEC = 0.3
with lock.RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "some-run"
    directory.mkdir()
    return directory / "lock"


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock without a heartbeat is stale at once; that of a holder, which beats more often, is not."""
    monkeypatch.setattr(lock_module, "STALE_AFTER_SEC", 0.5)


def change(path: Path, **fields: Any) -> None:
    """Change fields of the lock; None removes one. The mtime of the file is kept."""
    before = path.stat()
    owner = {name: value for name, value in {**json.loads(path.read_text()), **fields}.items() if value is not None}
    path.write_text(json.dumps(owner))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def set_age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def boot(path: Path) -> str:
    return str(json.loads(path.read_text())["process"]).partition(":")[0]


def test_lock_is_held_inside_and_removed_after(path: Path) -> None:
    assert not is_held(path)
    with RunLock(path) as lock:
        assert is_held(path)
        lock.check()
    assert not is_held(path)
    assert not path.exists()


def test_lock_is_released_after_error(path: Path) -> None:
    with pytest.raises(RuntimeError), RunLock(path):
        raise RuntimeError
    assert not path.exists()


def test_second_writer_is_refused_at_once(path: Path, holder: subprocess.Popen[str]) -> None:
    started = time.monotonic()
    with pytest.raises(UsageError, match=f"some-run.*process {holder.pid} on ") as caught, RunLock(path):
        pytest.fail("two writers")
    assert time.monotonic() - started < limit(5)
    assert caught.value.exit_code == 64
    assert caught.value.remedy
    assert json.loads(path.read_text())["pid"] == holder.pid


def test_second_writer_in_same_process_is_refused(path: Path) -> None:
    with RunLock(path), pytest.raises(UsageError), RunLock(path):
        pytest.fail("two writers")


def test_killed_owner_is_replaced_at_once(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    assert path.exists()
    assert not is_held(path)
    with RunLock(path) as lock:
        lock.check()


def test_zombie_owner_is_replaced(path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie now, and stays one
    with RunLock(path) as lock:
        lock.check()


def test_suspended_owner_on_this_machine_keeps_the_lock(path: Path, holder: subprocess.Popen[str]) -> None:
    """The process table decides, whatever the age of the heartbeat."""
    holder.send_signal(signal.SIGSTOP)
    set_age(path, 3600)
    with pytest.raises(UsageError), RunLock(path):
        pytest.fail("two writers")
    assert is_held(path)


@pytest.mark.usefixtures("quick")
def test_check_raises_for_replaced_owner(path: Path) -> None:
    first = RunLock(path)
    first.__enter__()
    change(path, host="elsewhere")
    with RunLock(path) as second:
        with pytest.raises(Superseded) as caught:
            first.check()
        assert caught.value.exit_code == 75
        first.__exit__(None, None, None)
        second.check()


def test_later_process_with_same_pid_is_not_the_owner(path: Path) -> None:
    """The first process of a restarted container has pid 1 again."""
    with RunLock(path):
        change(path, process=f"{boot(path)}:1")
        owner = path.read_text()
    path.write_text(owner)
    assert not is_held(path)
    with RunLock(path) as lock:
        lock.check()


ELSEWHERE = [
    {"host": "elsewhere"},
    {"process": "another-boot:1"},
    {"pid_namespace": 1},
    {"pid_namespace": None, "process": "another-boot:1"},  # a lock of an earlier version
    {"pid": "?"},
]


@pytest.mark.parametrize("fields", ELSEWHERE)
def test_invisible_owner_with_heartbeat_keeps_the_lock(
    path: Path, holder: subprocess.Popen[str], fields: dict[str, Any]
) -> None:
    """It is alive, but not in the process table of this machine."""
    change(path, **fields)
    for age in (3600, -3600):  # by this machine's clock
        set_age(path, age)
        started = time.monotonic()
        with pytest.raises(UsageError) as caught, RunLock(path):
            pytest.fail("two writers")
        assert time.monotonic() - started < limit(5)
        assert caught.value.exit_code == 64
    assert holder.poll() is None


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("fields", "age"), [*((fields, 0) for fields in ELSEWHERE), *((ELSEWHERE[0], age) for age in (3600, -365 * 86400))]
)
def test_remote_owner_without_heartbeat_is_replaced(
    path: Path, holder: subprocess.Popen[str], fields: dict[str, Any], age: int
) -> None:
    """Also if its lock has an mtime in the future."""
    change(path, **fields)
    set_age(path, age)
    holder.kill()
    holder.wait()
    started = time.monotonic()
    with RunLock(path) as lock:
        assert time.monotonic() - started >= lock_module.STALE_AFTER_SEC
        lock.check()


def test_live_owner_with_lock_of_earlier_version_keeps_it(path: Path, holder: subprocess.Popen[str]) -> None:
    change(path, pid_namespace=None)
    holder.send_signal(signal.SIGSTOP)  # so no heartbeat will change
    with pytest.raises(UsageError), RunLock(path):
        pytest.fail("two writers")


def test_clock_ahead_does_not_matter(
    path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(path, host="elsewhere")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)
    with pytest.raises(UsageError), RunLock(path):
        pytest.fail("two writers")
    assert holder.poll() is None


@pytest.mark.usefixtures("quick")
def test_time_while_suspended_does_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner may have been suspended too (a paused machine), and needs time for a heartbeat."""
    monkeypatch.setattr(lock_module, "_MAX_COUNTED_SEC", 0.1)
    path.write_text(json.dumps({"token": "x", "pid": 1, "host": "elsewhere", "process": "p"}))
    sleep = time.sleep
    slept: list[float] = []

    def freeze(seconds: float) -> None:
        slept.append(seconds)
        sleep(0.6)

    monkeypatch.setattr(time, "sleep", freeze)
    with RunLock(path):
        assert len(slept) >= 5


@pytest.mark.usefixtures("quick")
def test_one_of_two_waiters_gets_the_lock(path: Path) -> None:
    owner = {"token": "x", "pid": 1, "host": "elsewhere", "process": "p"}
    path.write_text(json.dumps(owner))
    with RunLock(path):
        pass
    path.write_text(json.dumps(owner))
    second = RunLock(path)
    gone = second._wait_for_owner(0.0)
    with RunLock(path) as first:
        assert not second._take(gone)
        first.check()


def test_is_held_uses_age_of_remote_heartbeat(path: Path) -> None:
    path.write_text(json.dumps({"token": "x", "pid": 1, "host": "elsewhere", "process": "p"}))
    assert is_held(path)
    for age in (STALE_AFTER_SEC + 10, -365 * 86400):
        set_age(path, age)
        assert not is_held(path)


def test_other_pid_namespace_does_not_take_over_live_owner(path: Path, holder: subprocess.Popen[str]) -> None:
    """As two containers with the host name of their machine."""
    other = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    ended = subprocess.run(
        [*other, sys.executable, "-c", HOLDER, str(path)], input="", capture_output=True, text=True, check=False
    )
    assert "UsageError" in ended.stderr
    assert ended.stdout == ""
    assert json.loads(path.read_text())["pid"] == holder.pid


def test_other_time_namespace_does_not_take_over_live_owner(path: Path, holder: subprocess.Popen[str]) -> None:
    """Where start times of processes are shifted."""
    other = ["unshare", "--user", "--map-root-user", "--time", "--fork", "--boottime", "1000"]
    if not shutil.which("unshare") or subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no time namespace can be made here")
    ended = subprocess.run(
        [*other, sys.executable, "-c", HOLDER, str(path)], input="", capture_output=True, text=True, check=False
    )
    assert "UsageError" in ended.stderr
    assert json.loads(path.read_text())["pid"] == holder.pid


def test_process_table_of_another_time_namespace_cannot_tell(path: Path, holder: subprocess.Popen[str]) -> None:
    change(path, time_namespace=1, process=f"{boot(path)}:1")
    assert lock_module._is_alive(json.loads(path.read_text())) is None
    assert holder.poll() is None


def unreadable(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    """The next reads of the lock fail as on network storage with a stale file handle."""
    read, left = lock_module._read, [times]

    def fail(path: Path) -> Any:
        if threading.current_thread() is threading.main_thread() and left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path)

    monkeypatch.setattr(lock_module, "_read", fail)


def test_briefly_unreadable_lock_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(path) as lock:
        unreadable(monkeypatch, 8)  # 2 s
        lock.check()


@pytest.mark.usefixtures("quick")
def test_unreadable_lock_is_peer_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(path) as lock:
        unreadable(monkeypatch, math.inf)
        with pytest.raises(PeerLost) as caught:
            lock.check()
        assert caught.value.exit_code == 75
        started = time.monotonic()
        with pytest.raises(PeerLost):
            lock.check()  # it has waited already
        assert time.monotonic() - started < lock_module.STALE_AFTER_SEC


@pytest.mark.usefixtures("quick")
def test_unreadable_lock_is_not_free(
    path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unreadable(monkeypatch, math.inf)
    with pytest.raises(UsageError), RunLock(path):
        pytest.fail("two writers")
    assert json.loads(path.read_text())["pid"] == holder.pid


@pytest.mark.parametrize("content", ["", "{", "null", "{}", "[1]"])
def test_damaged_lock_is_ignored(path: Path, content: str) -> None:
    path.write_text(content)
    with RunLock(path) as lock:
        lock.check()


def test_removed_lock_supersedes_owner(path: Path) -> None:
    with RunLock(path) as lock:
        path.unlink()
        with pytest.raises(Interrupted):
            lock.check()


def test_heartbeat_updates_mtime(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_SEC", 0.02)
    with RunLock(path):
        change(path, host="elsewhere")
        set_age(path, 3600)
        wait_until(lambda: is_held(path), 5)


def test_two_concurrent_starts_get_one_lock(path: Path) -> None:
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
    output = []
    for process in processes:
        assert process.stdout
        output.append(process.stdout.readline())  # empty when it was refused and ended
    for process in processes:
        process.communicate()
    assert sorted(output) == ["", "held\n"]
