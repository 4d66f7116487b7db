"""The program of pods that are held, as real processes: sent as text, run by a bare python3, one folder for its pod."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.env import HOLD_SCRIPT
from llmtrain.launch.pod_scripts import hold as held_pod
from llmtrain.launch.work import HELD_COMMAND

SOURCE = Path(held_pod.__file__).read_text(encoding="utf-8")
FASTER = {
    "GRACE_SEC = 10.0": "GRACE_SEC = 0.5",
    "ANSWER_SEC = 20.0": "ANSWER_SEC = 4.0",
    "POLL_SEC = 0.2": "POLL_SEC = 0.03",
    "join(5.0)": "join(0.5)",
}
# As the first process of a container does: orphans become its children (PR_SET_CHILD_SUBREAPER).
FIRST = "import ctypes\nctypes.CDLL(None).prctl(36, 1)\n"
GRACE_SEC = 0.5
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
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
# A child in a session of its own, as torchrun gives its processes one; its number goes into a file.
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
    """One work folder, and the processes that were started for it."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.log = folder / "volume" / "demo" / "logs" / "rank-0.log"
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

    def call(self, *words: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
        process = self.start(*words)
        out, err = process.communicate(given, timeout=20)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def take(self, data: bytes, size: int | None = None, digest: str | None = None) -> Any:
        digest = hashlib.sha256(data).hexdigest() if digest is None else digest
        return self.call("take", str(len(data) if size is None else size), digest, given=data)

    def hold(self, poll_sec: float = 0.03, **variables: str) -> "Held":
        text = FIRST + source(**{"POLL_SEC = 0.03": f"POLL_SEC = {poll_sec}"})
        return Held(self, self.start("hold", text=text, **variables))

    def python(self, code: str) -> list[str]:
        """A program, as a file beside the folder."""
        file = self.work.parent / f"program-{len(self.processes)}.py"
        file.write_text(code)
        return [sys.executable, str(file)]


class Held:
    """The first process; its standard output is the pod's log."""

    def __init__(self, pod: Pod, process: "subprocess.Popen[bytes]") -> None:
        self.pod, self.process = pod, process
        self.said: list[str] = []
        self.until("waits")

    def until(self, text: str) -> str:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline().decode("utf-8", "replace"):
            self.said.append(line.rstrip("\n"))
            if text in line:
                return self.said[-1]
        raise AssertionError(f"{text!r} was not said: {self.said}")

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
        return self.process.wait(10)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    made = Pod(tmp_path)
    yield made
    left = {int(path.read_text()) for path in made.work.glob("grandchild")}
    for process in made.processes:
        left |= held_pod.descendants(process.pid) if process.poll() is None else set()
        process.kill()
    for number in left:
        held_pod.tell(os.kill, number, signal.SIGKILL)
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


def wait_for(is_true: Callable[[], object], what: str = "", patience_sec: float = 10.0) -> None:
    deadline = time.monotonic() + patience_sec
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def first_line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def close_stdin(process: "subprocess.Popen[bytes]") -> int:
    """As when the connection breaks; the exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(10)


def test_it_is_fit_for_any_image() -> None:
    """Python 3.9, the standard library, and short enough for one variable of a pod (the kernel's limit is 128 KiB)."""
    tree = ast.parse(SOURCE, feature_version=(3, 9))
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    assert names <= sys.stdlib_module_names
    assert len(SOURCE.encode()) < 100_000
    # Evaluated when it is read, these would be an error in 3.9.
    loose = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for note in [node.returns, *(each.annotation for each in node.args.args)]
        if note is not None and any(isinstance(part, ast.BinOp) for part in ast.walk(note))
    ]
    assert loose == []


class TestTake:
    def test_files_come_whole_with_their_modes_and_times(self, pod: Pod) -> None:
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

    def test_rights_beyond_the_usual_are_not_taken_over(self, pod: Pod) -> None:
        assert pod.take(archive(row("tool", b"", 0o6755))).returncode == 0
        assert (pod.work / "tool").stat().st_mode & 0o7777 == 0o755

    def test_a_file_that_was_there_is_replaced_whole(self, pod: Pod) -> None:
        """Whoever reads the old one goes on reading it; a link is replaced, not followed."""
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

    def test_a_folder_in_its_place(self, pod: Pod) -> None:
        (pod.work / "a").mkdir()
        done = pod.take(archive(row("a", b"new")))
        assert done.returncode == 1
        assert [path.name for path in pod.work.iterdir()] == ["a"]

    def test_a_damaged_one_changes_nothing(self, pod: Pod) -> None:
        data = archive(row("train.py", b"new"))
        (pod.work / "train.py").write_text("old")
        done = pod.take(data, digest=hashlib.sha256(b"other").hexdigest())
        assert done.returncode == 1
        assert done.stderr.strip() == b"the archive was damaged on its way"
        assert (pod.work / "train.py").read_text() == "old"

    def test_one_that_ends_too_early_changes_nothing(self, pod: Pod) -> None:
        data = archive(row("train.py", b"new"))
        done = pod.take(data[:-1], size=len(data), digest=hashlib.sha256(data).hexdigest())
        assert done.returncode == 1
        assert done.stderr.strip() == b"the archive ends too early"
        assert files(pod.work) == []

    def test_one_that_does_not_fit_is_refused_before_it_is_sent(self, pod: Pod) -> None:
        process = pod.start("take", str(2**60), "0" * 64)
        assert process.wait(10) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert said.startswith(b"no room")
        assert b"Traceback" not in said
        assert files(pod.work) == []

    def test_it_waits_for_no_end_of_its_input(self, pod: Pod) -> None:
        """Over a websocket there is none: its size says when it is whole."""
        data = archive(row("train.py", b"new"))
        process = pod.start("take", str(len(data)), hashlib.sha256(data).hexdigest())
        assert process.stdin is not None
        process.stdin.write(data)
        process.stdin.flush()
        assert process.wait(10) == 0
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
    def test_anything_but_plain_files_below_is_refused(self, pod: Pod, name: str, kind: bytes) -> None:
        member = row(name.format(pod.work.parent), b"bad" if kind == tarfile.REGTYPE else b"")
        member[0].type, member[0].linkname = kind, "/etc/hostname"
        done = pod.take(archive(member))
        assert done.returncode == 1
        assert b"is no plain file" in done.stderr
        assert b"Traceback" not in done.stderr
        assert [path.name for path in pod.work.parent.iterdir()] == ["work"]
        assert list(pod.work.iterdir()) == []


class TestRun:
    @pytest.mark.parametrize(
        ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("exit 75", 75), ("kill -9 $$", 137), ("kill $$", 143)]
    )
    def test_the_exit_code(self, pod: Pod, script: str, code: int) -> None:
        process = pod.start("run", "{}", "sh", "-c", script)  # standard input stays open: nobody goes away
        assert process.wait(10) == code

    def test_a_command_that_is_not_there(self, pod: Pod) -> None:
        done = pod.call("run", "{}", "no-such-program", "-v")
        assert (done.returncode, done.stdout) == (127, b"")
        assert done.stderr == b"no-such-program cannot be run: No such file or directory\n"

    def test_its_place_its_variables_and_its_output(self, pod: Pod) -> None:
        show = "import os, sys; print(os.getcwd(), os.environ['PET_NODE_RANK'], os.environ['MINE'], [sys.stdin.read()])"
        program = pod.python(f"{show}; print('bad', file=sys.stderr)")
        process = pod.start("run", '{"PET_NODE_RANK": "1"}', *program, MINE="2")
        assert process.wait(10) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read().decode() == f"{pod.work} 1 2 ['']\n"
        assert process.stderr.read() == b"bad\n"

    def test_what_the_caller_types_does_not_end_it(self, pod: Pod) -> None:
        process = pod.start("run", "{}", *pod.python(SAVING))
        assert first_line(process) == "up"
        assert process.stdin is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        time.sleep(0.2)
        assert process.poll() is None
        assert not (pod.work / "saved").exists()

    def test_a_caller_that_goes_away_ends_it_and_it_may_save(self, pod: Pod) -> None:
        process = pod.start("run", "{}", *pod.python(SAVING))
        assert first_line(process) == "up"
        assert close_stdin(process) == 5
        assert (pod.work / "saved").read_text() == "yes"

    def test_one_that_does_not_end_is_killed(self, pod: Pod) -> None:
        process = pod.start("run", "{}", *pod.python(STUBBORN))
        assert first_line(process) == "up"
        began = time.monotonic()
        assert close_stdin(process) == 137
        assert GRACE_SEC <= time.monotonic() - began < GRACE_SEC + 5

    @pytest.mark.parametrize(
        ("then", "code"),
        [
            pytest.param(STUBBORN, 137, id="stubborn"),
            pytest.param("time.sleep(60)", 143, id="at once"),
        ],
    )
    def test_its_children_in_sessions_of_their_own_are_killed(self, pod: Pod, then: str, code: int) -> None:
        """Also where it ends at once itself, and they do not."""
        process = pod.start("run", "{}", *pod.python(FAMILY.format(inner=STUBBORN, then=then)))
        assert first_line(process) == "up"
        grandchild = int((pod.work / "grandchild").read_text())
        assert is_alive(grandchild)
        assert close_stdin(process) == code
        wait_for(lambda: not is_alive(grandchild), "the grandchild goes on", 1.0)

    def test_children_of_a_shell_that_ends_at_once_may_save_too(self, pod: Pod) -> None:
        process = pod.start("run", "{}", "sh", "-c", '"$0" "$1"; true', *pod.python(SAVING))
        assert first_line(process) == "up"
        assert close_stdin(process) == 143
        wait_for((pod.work / "saved").exists, "it was killed before its grace was over")

    def test_what_is_the_pods_own_is_not_the_commands(self, pod: Pod) -> None:
        """`llmtrain node` in it would take itself for the pod's, and wait to be removed."""
        code = "import os; print(sorted(name for name in os.environ if name.startswith('LLMTRAIN_')))"
        own = {"LLMTRAIN_EXIT_CODES": "statefulset", "LLMTRAIN_LAUNCH": "1", "LLMTRAIN_RUN_DIR": "/out/demo"}
        own["LLMTRAIN_PREFETCHED"] = "/cache/prefetch.json"
        process = pod.start("run", "{}", *pod.python(code), **own)
        assert "LLMTRAIN_RUN_DIR" in (line := first_line(process))
        assert "EXIT_CODES" not in line
        assert "PREFETCHED" not in line
        assert "LAUNCH" not in line


class TestHold:
    def test_what_it_runs_goes_to_the_log_of_the_pod_and_to_a_file(self, pod: Pod) -> None:
        held = pod.hold()
        code = "import os, sys; print(os.environ['PET_NODE_RANK'], os.getcwd()); sys.stdout.flush(); "
        code += "os.write(2, b'\\xff not text\\nno end of line'); sys.exit(3)"
        answer = held.start(*pod.python(code), PET_NODE_RANK="1")
        number = answer["process"]
        assert isinstance(number, int)
        held.until("ended with")
        said = [f"1 {pod.work}", "\ufffd not text", f"no end of line[HOLD] process {number} ended with exit code 3"]
        started = next(line for line in held.said if line.startswith(f"[HOLD] started {sys.executable} "))
        assert started.endswith(f"(process {number})")
        held.said.remove(started)
        assert held.said[1:] == said
        assert pod.log.read_bytes() == f"1 {pod.work}\n".encode() + b"\xff not text\nno end of line"

    def test_output_comes_while_it_runs_and_outlives_the_caller(self, pod: Pod) -> None:
        held = pod.hold()
        number = held.start(*pod.python(STUBBORN))["process"]
        assert held.until("up") == "up"
        wait_for(lambda: pod.log.read_text() == "up\n")
        assert is_alive(number), "whoever started it has ended long ago"

    def test_a_second_one_is_refused_while_the_first_runs(self, pod: Pod) -> None:
        held = pod.hold()
        number = held.start("sleep", "60")["process"]
        refused = held.start("touch", "ran")
        assert "process" not in refused
        assert refused["problem"] == f"a command is still running here (process {number})"
        assert is_alive(number)
        assert not (pod.work / "ran").exists()

    def test_one_that_has_ended_can_be_followed_by_another(self, pod: Pod) -> None:
        """At once: that the first has ended need not have been noticed before."""
        held = pod.hold(poll_sec=0.3)
        for turn in range(3):
            first = held.start("sh", "-c", f"echo turn {turn}; echo $$ > number")
            assert "process" in first, first
            wait_for(lambda number=first["process"]: not is_alive(number))  # type: ignore[misc]
        held.until("turn 2")
        wait_for(lambda: pod.log.read_text() == "turn 0\nturn 1\nturn 2\n")

    def test_end_lets_it_save(self, pod: Pod) -> None:
        held = pod.hold()
        assert held.end()["process"] is None
        number = held.start(*pod.python(SAVING))["process"]
        held.until("up")
        assert held.end()["process"] == number
        assert (pod.work / "saved").read_text() == "yes"
        assert held.until("ended with") == f"[HOLD] process {number} ended with exit code 5"
        assert held.end()["process"] is None

    def test_end_lets_children_of_a_shell_save_too(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", '"$0" "$1"; true', *pod.python(SAVING))
        held.until("up")
        held.end()
        assert (pod.work / "saved").exists()

    def test_end_kills_a_stubborn_one_and_its_family_and_another_may_follow(self, pod: Pod) -> None:
        held = pod.hold()
        family = FAMILY.format(inner=STUBBORN, then="import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)")
        number = held.start(*pod.python(family))["process"]
        held.until("up")
        grandchild = int((pod.work / "grandchild").read_text())
        assert held.end()["process"] == number
        again = held.start("echo", "next")
        assert "process" in again, again
        assert not is_alive(number)
        wait_for(lambda: not is_alive(grandchild))
        assert held.until("ended with") == f"[HOLD] process {number} ended with exit code 137"
        held.until("next")

    def test_end_ends_what_it_left_in_the_background(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", "sleep 60 & echo $! > grandchild; echo up")
        held.until("up")
        left = int((pod.work / "grandchild").read_text())
        assert is_alive(left)
        held.end()
        wait_for(lambda: not is_alive(left), "it goes on, and nothing ends it", 1.0)

    def test_a_command_that_is_not_there(self, pod: Pod) -> None:
        held = pod.hold()
        assert held.start("no-such-program")["problem"] == "no-such-program cannot be run: No such file or directory"
        assert "process" in held.start("true"), "it goes on"

    @pytest.mark.parametrize(("variables", "code"), [({}, 75), ({"LLMTRAIN_EXIT_CODES": "pytorchjob"}, 203)])
    def test_told_to_end_it_ends_what_runs(self, pod: Pod, variables: dict[str, str], code: int) -> None:
        held = pod.hold(**variables)
        number = held.start(*pod.python(SAVING))["process"]
        held.until("up")
        assert held.terminate() == code
        assert (pod.work / "saved").read_text() == "yes"
        assert held.until("ended with") == f"[HOLD] process {number} ended with exit code 5"

    def test_told_to_end_it_kills_the_stubborn(self, pod: Pod) -> None:
        held = pod.hold()
        number = held.start(*pod.python(STUBBORN))["process"]
        held.until("up")
        assert held.terminate() == 75
        wait_for(lambda: not is_alive(number))

    def test_what_was_not_fetched_is_told_and_it_waits_all_the_same(self, pod: Pod, tmp_path: Path) -> None:
        report = tmp_path / "prefetch.json"
        report.write_text('{"what": "no-such/model is not on the hub.", "exit_code": 64}')
        held = pod.hold(LLMTRAIN_PREFETCHED=str(report))
        assert "no-such/model" in held.said[0]
        assert held.start("true")["process"]

    def test_told_to_end_with_nothing_running(self, pod: Pod) -> None:
        began = time.monotonic()
        assert pod.hold().terminate() == 75
        assert time.monotonic() - began < 3

    def test_a_log_that_cannot_be_written_is_told_and_does_not_stop_it(self, pod: Pod) -> None:
        held = pod.hold()
        (pod.work / "file").write_text("")
        log = pod.work / "file" / "rank-0.log"
        number = held.start("sh", "-c", "echo one; echo two", log=log)["process"]
        held.until("ended with exit code 0")
        assert held.said.count(f"[HOLD] {log} cannot be written: File exists") == 1
        assert [line for line in held.said if not line.startswith("[HOLD]")] == ["one", "two"]
        assert held.said[-1] == f"[HOLD] process {number} ended with exit code 0"

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
    def test_a_disk_that_runs_full(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", "echo one; echo two", log=Path("/dev/full"))
        held.until("ended with exit code 0")
        assert {"one", "two"} <= set(held.said)
        assert held.said.count("[HOLD] /dev/full cannot be written: No space left on device") == 1

    def test_orphans_are_seen_off(self, pod: Pod) -> None:
        held = pod.hold()
        held.start("sh", "-c", "(sleep 0.4 & echo $! > orphan); echo up; exec sleep 60")
        held.until("up")
        orphan = int((pod.work / "orphan").read_text())
        wait_for(lambda: state_and_parent(orphan)[1] == held.process.pid, "nobody took it over")
        wait_for(lambda: state_and_parent(orphan) == ("", 0), "it is still there, dead")

    def test_a_request_of_a_container_before_is_not_done_again(self, pod: Pod) -> None:
        (pod.work / ".llmtrain").mkdir()
        old = {"number": "7-1", "start": ["touch", "ran"], "variables": {}, "log": str(pod.log)}
        (pod.work / ".llmtrain" / "request.json").write_text(json.dumps(old))
        held = pod.hold()
        number = held.start("sleep", "60")["process"]
        assert is_alive(number)
        assert held.said[-1].startswith("[HOLD] "), held.said
        assert not (pod.work / "ran").exists()

    def test_a_first_process_that_does_not_answer(self, pod: Pod) -> None:
        text = source(**{"ANSWER_SEC = 4.0": "ANSWER_SEC = -0.4"})
        process = pod.start("end", text=text)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 1
        assert err == b"the pod's first process does not answer\n"


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


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())
