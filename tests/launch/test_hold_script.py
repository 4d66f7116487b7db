"""hold.py as real processes: run by an isolated python3 from an environment variable, with a directory per pod."""

import ast
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from limits import limit, wait_until
from llmtrain.core.env import HOLD_SCRIPT
from llmtrain.launch.pod_scripts import hold as hold_script
from llmtrain.launch.pod_task import HELD_COMMAND

SOURCE = Path(hold_script.__file__).read_text(encoding="utf-8")
FASTER = {
    "GRACE_SEC = 10.0": "GRACE_SEC = 0.5",
    "POLL_SEC = 0.2": "POLL_SEC = 0.03",
    "join(5.0)": "join(0.5)",
}
# Like process 1 of a container: orphans become its children (PR_SET_CHILD_SUBREAPER).
SUBREAPER = "import ctypes\nctypes.CDLL(None).prctl(36, 1)\n"
GRACE_SEC = 0.5
IGNORE_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)
SAVING = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.2)
    pathlib.Path("saved").write_text("yes")
    sys.exit(5)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
# A child in its own session, like a torchrun worker; its pid is written to a file.
FAMILY = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {inner!r}], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path("grandchild").write_text(str(child.pid))
print("up", flush=True)
{then}
"""


def source(**changes: str) -> str:
    text = SOURCE
    for old, new in {**FASTER, **changes}.items():
        assert old in text
        text = text.replace(old, new)
    return text


class Pod:
    """A work directory and the processes started for it."""

    def __init__(self, directory: Path) -> None:
        self.work = directory / "work"
        self.work.mkdir()
        self.log = directory / "volume" / "demo" / "logs" / "rank-0.log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *words: str, text: str = "", **variables: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, *HELD_COMMAND[1:], *words]
        env = {**os.environ, HOLD_SCRIPT: text or source(), "LLMTRAIN_WORK": str(self.work), **variables}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(  # type: ignore[call-overload]
            command, env=env, start_new_session=True, **pipes
        )
        self.processes.append(process)
        return process  # type: ignore[no-any-return]

    def call(self, *words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        process = self.start(*words)
        out, err = process.communicate(stdin, timeout=limit(20))
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def take(self, data: bytes, size: int | None = None, digest: str | None = None) -> Any:
        digest = hashlib.sha256(data).hexdigest() if digest is None else digest
        return self.call("take", str(len(data) if size is None else size), digest, stdin=data)

    def hold(self, poll_sec: float = 0.03, **variables: str) -> "Held":
        text = SUBREAPER + source(**{"POLL_SEC = 0.03": f"POLL_SEC = {poll_sec}"})
        return Held(self, self.start("hold", text=text, **variables))

    def python(self, code: str) -> list[str]:
        """The command that runs this code from a file beside the work directory."""
        file = self.work.parent / f"program-{len(self.processes)}.py"
        file.write_text(code)
        return [sys.executable, str(file)]


class Held:
    """The main process; its standard output is the pod's log."""

    def __init__(self, pod: Pod, process: "subprocess.Popen[bytes]") -> None:
        self.pod, self.process = pod, process
        self.lines: list[str] = []
        self.until("is ready")

    def until(self, text: str) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().decode("utf-8", "replace"):
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"{text!r} was not logged: {self.lines}")

    def start(self, *words: str, log: Path | None = None, **variables: str) -> dict[str, Any]:
        return self._answer("start", json.dumps(variables), str(log or self.pod.log), *words)

    def end(self) -> dict[str, Any]:
        return self._answer("end")

    def _answer(self, *words: str) -> dict[str, Any]:
        done = self.pod.call(*words)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
        return answer

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(limit(10))


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    remaining = {int(path.read_text()) for path in made.work.glob("grandchild")}
    for process in made.processes:
        remaining |= hold_script.descendants(process.pid) if process.poll() is None else set()
        process.kill()
    for number in remaining:
        hold_script.send_signal(os.kill, number, signal.SIGKILL)
    for process in made.processes:
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def is_alive(process: int) -> bool:
    return state_and_parent(process)[0] not in ("", "Z")


def state_and_parent(process: int) -> tuple[str, int]:
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[0], int(words[1])


def first_line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def close_stdin(process: "subprocess.Popen[bytes]") -> int:
    """Close standard input, as a broken connection does, and return the exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(limit(10))


def test_script_runs_in_any_image() -> None:
    """Python 3.9, standard library only, and small enough for an environment variable (at most 128 KiB)."""
    tree = ast.parse(SOURCE, feature_version=(3, 9))
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert names <= sys.stdlib_module_names
    assert len(SOURCE.encode()) < 100_000
    # Unquoted, such annotations are evaluated on import, which fails in 3.9.
    unquoted = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for note in [node.returns, *(each.annotation for each in node.args.args)]
        if note is not None and any(isinstance(part, ast.BinOp) for part in ast.walk(note))
    ]
    assert unquoted == []


class TestTake:
    def test_files_keep_content_mode_and_time(self, pod: Pod) -> None:
        data = os.urandom(3 * 2**20 + 7)
        done = pod.take(archive(row("train.py", b"print(1)\n", 0o755, 1_700_000_000), row("a/b/c.bin", data, 0o600)))
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        script, inner = pod.work / "train.py", pod.work / "a/b/c.bin"
        assert (script.read_bytes(), script.stat().st_mode & 0o7777, script.stat().st_mtime) == (
            b"print(1)\n",
            0o755,
            1_700_000_000,
        )
        assert (inner.read_bytes(), inner.stat().st_mode & 0o7777) == (data, 0o600)
        assert files(pod.work) == ["a/b/c.bin", "train.py"]

    def test_setuid_bits_are_removed(self, pod: Pod) -> None:
        assert pod.take(archive(row("tool", b"", 0o6755))).returncode == 0
        assert (pod.work / "tool").stat().st_mode & 0o7777 == 0o755

    def test_existing_file_is_replaced_atomically(self, pod: Pod) -> None:
        """A process that has the old file open keeps reading it; a symbolic link is replaced, not followed."""
        old, outside = pod.work / "old.py", pod.work.parent / "outside"
        old.write_text("the old one, and longer")
        old.chmod(0o400)
        outside.write_text("untouched")
        (pod.work / "link.py").symlink_to(outside)
        with old.open() as reader:
            assert pod.take(archive(row("old.py", b"new"), row("link.py", b"mine"))).returncode == 0
            assert reader.read() == "the old one, and longer"
        assert old.read_text() == "new"
        assert (pod.work / "link.py").read_text() == "mine"
        assert not (pod.work / "link.py").is_symlink()
        assert outside.read_text() == "untouched"
        assert files(pod.work) == ["link.py", "old.py"]

    def test_directory_with_the_same_name_is_kept(self, pod: Pod) -> None:
        (pod.work / "a").mkdir()
        done = pod.take(archive(row("a", b"new")))
        assert done.returncode == 1
        assert [path.name for path in pod.work.iterdir()] == ["a"]

    def test_damaged_archive_changes_nothing(self, pod: Pod) -> None:
        data = archive(row("train.py", b"new"))
        (pod.work / "train.py").write_text("old")
        done = pod.take(data, digest=hashlib.sha256(b"other").hexdigest())
        assert done.returncode == 1
        assert b"damaged" in done.stderr
        assert (pod.work / "train.py").read_text() == "old"

    def test_incomplete_archive_changes_nothing(self, pod: Pod) -> None:
        data = archive(row("train.py", b"new"))
        done = pod.take(data[:-1], size=len(data), digest=hashlib.sha256(data).hexdigest())
        assert done.returncode == 1
        assert b"incomplete" in done.stderr
        assert files(pod.work) == []

    def test_archive_that_does_not_fit_is_refused_before_it_is_sent(self, pod: Pod) -> None:
        process = pod.start("take", str(2**60), "0" * 64)
        assert process.wait(limit(10)) == 1
        assert process.stderr is not None
        err = process.stderr.read()
        assert b"disk space" in err
        assert b"Traceback" not in err
        assert files(pod.work) == []

    def test_archive_ends_by_size_not_by_end_of_input(self, pod: Pod) -> None:
        """A websocket cannot close standard input alone."""
        data = archive(row("train.py", b"new"))
        process = pod.start("take", str(len(data)), hashlib.sha256(data).hexdigest())
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.flush()
        assert process.wait(limit(10)) == 0
        assert (pod.work / "train.py").read_text() == "new"

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("../outside", tarfile.REGTYPE),
            ("a/../../outside", tarfile.REGTYPE),
            ("{}/outside", tarfile.REGTYPE),
            ("link", tarfile.SYMTYPE),
            ("link", tarfile.LNKTYPE),
            ("device", tarfile.CHRTYPE),
            ("pipe", tarfile.FIFOTYPE),
            ("folder", tarfile.DIRTYPE),
        ],
    )
    def test_anything_but_regular_files_inside_is_refused(self, pod: Pod, name: str, kind: bytes) -> None:
        member = row(name.format(pod.work.parent), b"bad" if kind == tarfile.REGTYPE else b"")
        member[0].type, member[0].linkname = kind, "/etc/hostname"
        done = pod.take(archive(member))
        assert done.returncode == 1
        assert b"not a regular file" in done.stderr
        assert b"Traceback" not in done.stderr
        assert [path.name for path in pod.work.parent.iterdir()] == ["work"]
        assert list(pod.work.iterdir()) == []


class TestRun:
    @pytest.mark.parametrize(
        ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("exit 75", 75), ("kill -9 $$", 137), ("kill $$", 143)]
    )
    def test_run_returns_the_exit_code(self, pod: Pod, script: str, code: int) -> None:
        process = pod.start("run", "{}", "sh", "-c", script)  # standard input stays open: the client is connected
        assert process.wait(limit(10)) == code

    def test_run_of_missing_program(self, pod: Pod) -> None:
        done = pod.call("run", "{}", "no-such-program", "-v")
        assert (done.returncode, done.stdout) == (127, b"")
        assert b"no-such-program: No such file or directory" in done.stderr

    def test_run_directory_variables_and_output(self, pod: Pod) -> None:
        show = "import os, sys; print(os.getcwd(), os.environ['PET_NODE_RANK'], os.environ['MINE'], [sys.stdin.read()])"
        program = pod.python(f"{show}; print('bad', file=sys.stderr)")
        process = pod.start("run", '{"PET_NODE_RANK": "1"}', *program, MINE="2")
        assert process.wait(limit(10)) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read().decode() == f"{pod.work} 1 2 ['']\n"
        assert process.stderr.read() == b"bad\n"

    def test_input_of_the_client_does_not_stop_the_command(self, pod: Pod) -> None:
        process = pod.start("run", "{}", *pod.python(SAVING))
        assert first_line(process) == "up"
        assert process.stdin is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        time.sleep(0.2)
        assert process.poll() is None
        assert not (pod.work / "saved").exists()

    def test_disconnect_sends_sigterm(self, pod: Pod) -> None:
        process = pod.start("run", "{}", *pod.python(SAVING))
        assert first_line(process) == "up"
        assert close_stdin(process) == 5
        assert (pod.work / "saved").read_text() == "yes"

    def test_command_that_ignores_sigterm_is_killed(self, pod: Pod) -> None:
        process = pod.start("run", "{}", *pod.python(IGNORE_SIGTERM))
        assert first_line(process) == "up"
        started = time.monotonic()
        assert close_stdin(process) == 137
        assert GRACE_SEC <= time.monotonic() - started < GRACE_SEC + limit(5)

    @pytest.mark.parametrize(
        ("then", "code"),
        [
            pytest.param(IGNORE_SIGTERM, 137, id="ignores SIGTERM"),
            pytest.param("time.sleep(60)", 143, id="exits at once"),
        ],
    )
    def test_children_in_their_own_sessions_are_killed(self, pod: Pod, then: str, code: int) -> None:
        """Also if the command itself exits at once and they do not."""
        process = pod.start("run", "{}", *pod.python(FAMILY.format(inner=IGNORE_SIGTERM, then=then)))
        assert first_line(process) == "up"
        if then == IGNORE_SIGTERM:
            assert first_line(process) == "up"  # ignores it from here on
        grandchild = int((pod.work / "grandchild").read_text())
        assert is_alive(grandchild)
        assert close_stdin(process) == code
        wait_until(lambda: not is_alive(grandchild), 1.0, "the grandchild is still running")

    def test_children_of_a_shell_that_exits_at_once_can_save(self, pod: Pod) -> None:
        process = pod.start("run", "{}", "sh", "-c", '"$0" "$1"; true', *pod.python(SAVING))
        assert first_line(process) == "up"
        assert close_stdin(process) == 143
        wait_until((pod.work / "saved").exists, what="it was killed before the grace period ended")

    def test_variables_of_the_pod_are_not_passed_to_commands(self, pod: Pod) -> None:
        """With them `llmtrain node` would act as the main process and wait to be deleted."""
        code = "import os; print(sorted(name for name in os.environ if name.startswith('LLMTRAIN_')))"
        own = {"LLMTRAIN_EXIT_CODES": "statefulset", "LLMTRAIN_LAUNCH": "1", "LLMTRAIN_RUN_DIR": "/out/demo"}
        own["LLMTRAIN_PREFETCHED"] = "/cache/prefetch.json"
        process = pod.start("run", "{}", *pod.python(code), **own)
        assert "LLMTRAIN_RUN_DIR" in (line := first_line(process))
        assert "EXIT_CODES" not in line
        assert "PREFETCHED" not in line
        assert "LAUNCH" not in line


class TestHold:
    def test_output_goes_to_the_pod_log_and_to_a_file(self, pod: Pod) -> None:
        held = pod.hold()
        code = "import os, sys; print(os.environ['PET_NODE_RANK'], os.getcwd()); sys.stdout.flush(); "
        code += "os.write(2, b'\\xff not text\\nno end of line'); sys.exit(3)"
        answer = held.start(*pod.python(code), PET_NODE_RANK="1")
        number = answer["process"]
        assert isinstance(number, int)
        held.until("exited with")
        output = [f"1 {pod.work}", "\ufffd not text", f"no end of line[HOLD] process {number} exited with code 3"]
        started = next(line for line in held.lines if line.startswith(f"[HOLD] started {sys.executable} "))
        assert started.endswith(f"(process {number})")
        held.lines.remove(started)
        assert held.lines[1:] == output
        assert pod.log.read_bytes() == f"1 {pod.work}\n".encode() + b"\xff not text\nno end of line"

    def test_started_command_outlives_the_client(self, pod: Pod) -> None:
        held = pod.hold()
        number = held.start(*pod.python(IGNORE_SIGTERM))["process"]
        assert held.until("up") == "up"
        wait_until(lambda: pod.log.read_text() == "up\n")
        assert is_alive(number)

    def test_second_command_is_refused_while_the_first_runs(self, pod: Pod) -> None:
        held = pod.hold()
        number = held.start("sleep", "60")["process"]
        refused = held.start("touch", "ran")
        assert "process" not in refused
        assert f"(process {number})" in refused["problem"]
        assert is_alive(number)
        assert not (pod.work / "ran").exists()

    def test_next_command_starts_right_after_the_first_has_exited(self, pod: Pod) -> None:
        """Even if its exit has not been noticed by polling."""
        held = pod.hold(poll_sec=0.3)
        for turn in range(3):
            first = held.start("sh", "-c", f"echo turn {turn}; echo $$ > number")
            assert "process" in first, first
            wait_until(lambda number=first["process"]: not is_alive(number))  # type: ignore[misc]
        held.until("turn 2")
        wait_until(lambda: pod.log.read_text() == "turn 0\nturn 1\nturn 2\n")

    def test_end_sends_sigterm(self, pod: Pod) -> None:
        held = pod.hold()
        assert held.end()["process"] is None
        number = held.start(*pod.python(SAVING))["process"]
        held.until("up")
        assert held.end()["process"] == number
        assert (pod.work / "saved").read_text() == "yes"
        assert held.until("exited with") == f"[HOLD] process {number} exited with code 5"
        assert held.end()["process"] is None

    def test_end_lets_children_of_a_shell_save(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", '"$0" "$1"; true', *pod.python(SAVING))
        held.until("up")
        held.end()
        assert (pod.work / "saved").exists()

    def test_end_kills_a_command_that_ignores_sigterm_with_its_descendants(self, pod: Pod) -> None:
        held = pod.hold()
        family = FAMILY.format(
            inner=IGNORE_SIGTERM, then="import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
        )
        number = held.start(*pod.python(family))["process"]
        held.until("up")
        grandchild = int((pod.work / "grandchild").read_text())
        assert held.end()["process"] == number
        again = held.start("echo", "next")
        assert "process" in again, again
        assert not is_alive(number)
        wait_until(lambda: not is_alive(grandchild))
        assert held.until("exited with") == f"[HOLD] process {number} exited with code 137"
        held.until("next")

    def test_end_stops_background_processes(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", "sleep 60 & echo $! > grandchild; echo up")
        held.until("up")
        background = int((pod.work / "grandchild").read_text())
        assert is_alive(background)
        held.end()
        wait_until(lambda: not is_alive(background), 1.0, "still running")

    def test_start_of_missing_program(self, pod: Pod) -> None:
        held = pod.hold()
        assert "no-such-program: No such file or directory" in held.start("no-such-program")["problem"]
        assert "process" in held.start("true"), "still accepts commands"

    @pytest.mark.parametrize(("variables", "code"), [({}, 75), ({"LLMTRAIN_EXIT_CODES": "pytorchjob"}, 203)])
    def test_sigterm_stops_the_running_command(self, pod: Pod, variables: dict[str, str], code: int) -> None:
        held = pod.hold(**variables)
        number = held.start(*pod.python(SAVING))["process"]
        held.until("up")
        assert held.terminate() == code
        assert (pod.work / "saved").read_text() == "yes"
        assert held.until("exited with") == f"[HOLD] process {number} exited with code 5"

    def test_sigterm_kills_a_command_that_ignores_it(self, pod: Pod) -> None:
        held = pod.hold()
        number = held.start(*pod.python(IGNORE_SIGTERM))["process"]
        held.until("up")
        assert held.terminate() == 75
        wait_until(lambda: not is_alive(number))

    def test_failed_prefetch_is_logged_and_the_pod_is_usable(self, pod: Pod, tmp_path: Path) -> None:
        report = tmp_path / "prefetch.json"
        report.write_text('{"what": "no-such/model is not on the hub.", "exit_code": 64}')
        held = pod.hold(LLMTRAIN_PREFETCHED=str(report))
        assert "no-such/model" in held.lines[0]
        assert held.start("true")["process"]

    def test_sigterm_without_a_running_command(self, pod: Pod) -> None:
        started = time.monotonic()
        assert pod.hold().terminate() == 75
        assert time.monotonic() - started < limit(3)

    def test_unwritable_log_file_does_not_stop_the_command(self, pod: Pod) -> None:
        held = pod.hold()
        (pod.work / "file").write_text("")
        log = pod.work / "file" / "rank-0.log"
        number = held.start("sh", "-c", "echo one; echo two", log=log)["process"]
        held.until("exited with code 0")
        assert held.lines.count(f"[HOLD] cannot write {log}: File exists") == 1
        assert [line for line in held.lines if not line.startswith("[HOLD]")] == ["one", "two"]
        assert held.lines[-1] == f"[HOLD] process {number} exited with code 0"

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_full_disk_does_not_stop_the_command(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", "echo one; echo two", log=Path("/dev/full"))
        held.until("exited with code 0")
        assert {"one", "two"} <= set(held.lines)
        assert held.lines.count("[HOLD] cannot write /dev/full: No space left on device") == 1

    def test_orphans_are_reaped(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", "(sleep 0.4 & echo $! > orphan); echo up; exec sleep 60")
        held.until("up")
        orphan = int((pod.work / "orphan").read_text())
        wait_until(lambda: state_and_parent(orphan)[1] == held.process.pid, what="not adopted")
        wait_until(lambda: state_and_parent(orphan) == ("", 0), what="still a zombie")

    def test_requests_of_an_earlier_container_are_ignored(self, pod: Pod) -> None:
        (pod.work / ".llmtrain").mkdir()
        old = {"number": "7-1", "start": ["touch", "ran"], "variables": {}, "log": str(pod.log)}
        (pod.work / ".llmtrain" / "request.json").write_text(json.dumps(old))
        held = pod.hold()
        number = held.start("sleep", "60")["process"]
        assert is_alive(number)
        assert held.lines[-1].startswith("[HOLD] "), held.lines
        assert not (pod.work / "ran").exists()

    def test_main_process_that_does_not_respond(self, pod: Pod) -> None:
        text = source(**{"ANSWER_SEC = 20.0": "ANSWER_SEC = -0.4"})
        process = pod.start("end", text=text)
        _, err = process.communicate(timeout=limit(10))
        assert process.returncode == 1
        assert b"main process" in err


def row(name: str, data: bytes, mode: int = 0o644, changed_at: int = 0) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), mode, changed_at
    return info, data


def archive(*rows: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for info, data in rows:
            made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir())
