"""`llmtrain node` on platforms with their own exit-code convention: LLMTRAIN_EXIT_CODES."""

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fault_harness as harness
import pytest
import rank_harness as ranks
from rank_harness import Cli, free_port, start_cli

from fork_server import ignore_as_in_background
from limits import limit, wait_until
from llmtrain.distributed.platform_codes import IDLE_MARK, LONG_RUN_SEC, count_crash, ended_before, pytorchjob_code
from llmtrain.errors import TrainingFailed
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.heartbeats import announce_start, read_heartbeats
from slow_cases import some

# Writes its pid, and exits with 75 on SIGTERM, as a trainer does after saving.
TRAINER = """
import os, signal, sys, time
def stop(number, frame):
    open("signals", "a").write("x")
    time.sleep(0.3)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
open("pid.new", "w").write(str(os.getpid()))
os.rename("pid.new", "pid")
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    ranks.end_clis()


def node(folder: Path, platform: str, *words: object, before: Callable[[], None] | None = None, **env: str) -> Cli:
    """A container of a pod of its own: TMPDIR is the pod's emptyDir, which outlives the container."""
    variables = {"LLMTRAIN_EXIT_CODES": platform, "TMPDIR": tempfile.mkdtemp(), **env}
    one = start_cli("node", *words, env=variables, cwd=folder, before=before)
    STARTED[id(one)] = (folder, platform, words, variables)
    return one


STARTED: dict[int, tuple[Path, str, tuple[object, ...], dict[str, str]]] = {}
RESTARTED: dict[int, Cli] = {}


def config_file(folder: Path, cache: Path, **changes: Any) -> Path:
    settings = {"trainer__grad_accum_steps": 4, "distributed__strategy": "ddp", "distributed__timeout_sec": 30}
    path = folder / "train.json"
    path.write_text(json.dumps(harness.tiny_config(folder / "runs", cache, **{**settings, **changes}).as_dict()))
    return path


def idle_line(code: int) -> str:
    return f"[DDP] {IDLE_MARK} {code}; a StatefulSet would start this again, so the pod waits to be removed"


def wait_until_idle(one: Cli, code: int) -> None:
    """The container exits once with the code; the one that the kubelet starts in its place waits."""
    assert one.wait(100) == code, one.err
    folder, platform, words, variables = STARTED[id(one)]
    again = RESTARTED[id(one)] = node(folder, platform, *words, **variables)
    again.wait_for(lambda: again.err.rstrip().endswith(idle_line(code)))
    time.sleep(0.2)
    assert not again.is_over()
    assert again.out == ""


def remove(one: Cli, number: int = signal.SIGTERM) -> None:
    started = time.monotonic()
    one = RESTARTED[id(one)]
    one.send(number)
    assert one.wait(10) == 0, one.err
    assert time.monotonic() - started < limit(3)


def record(folder: Path) -> Any:
    value = json.loads((folder / "runs" / "tiny" / "ended.json").read_text())
    return {name: value[name] for name in ("exit_code", "launch")}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# PyTorchJob: 1 to 127 is permanent there.


@pytest.mark.parametrize(
    ("code", "said"),
    [(0, 0), (1, 129), (64, 64), (65, 65), (69, 197), (75, 203), (127, 255), (128, 128), (137, 137), (255, 255)],
)
def test_pytorchjob_codes(code: int, said: int) -> None:
    assert pytorchjob_code(code) == said


TRANSLATED = [(count, code) for count in (1, 2) for code in (0, 7, 64, 75, 143)]


@pytest.mark.parametrize("case", some(TRANSLATED, *TRANSLATED[:5], (2, 75)), ids=lambda case: f"{case[0]}-{case[1]}")
def test_command_exit_code_is_translated(tmp_path: Path, case: tuple[int, int]) -> None:
    """One process replaces the node, two are supervised by it: the exit codes are the same."""
    count, code = case
    said = {0: 0, 7: 135, 64: 64, 75: 203, 143: 143}[code]
    words = ["--processes-per-node", count, "--", sys.executable, "-c", f"raise SystemExit({code})"]
    done = node(tmp_path, "pytorchjob", *words)
    assert done.wait(30) == said, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("platform", "crashed"), [("pytorchjob", 129), ("statefulset", 1)])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_third_crash_of_a_command_in_a_row_exits_65(tmp_path: Path, platform: str, crashed: int, count: int) -> None:
    """Neither platform limits restarts: the third crash in a row of one launch exits with 65."""
    words = ["--processes-per-node", count, "--", sys.executable, "-c", "raise SystemExit(1)"]

    def crash(launch: str) -> Cli:
        return node(tmp_path, platform, *words, LLMTRAIN_RUN_DIR=str(tmp_path / "demo"), LLMTRAIN_LAUNCH=launch)

    for _ in range(2):
        done = crash("1")
        assert done.wait(60) == crashed, done.err
    last = crash("1")
    if platform == "statefulset":
        wait_until_idle(last, 65)
        remove(last)
    else:
        assert last.wait(60) == 65, last.err
    assert "Traceback" not in last.err
    assert crash("2").wait(60) == crashed, "a new launch starts a new count"


@pytest.mark.parametrize(
    ("code", "was_interrupted"), [(0, False), (64, False), (65, False), (69, False), (75, False), (1, True)]
)
def test_exits_that_do_not_count_as_crash(tmp_path: Path, code: int, was_interrupted: bool) -> None:
    env = {"LLMTRAIN_RUN_DIR": str(tmp_path), "LLMTRAIN_LAUNCH": "1"}
    for _ in range(5):
        count_crash(code, was_interrupted, 1.0, env)
    assert list(tmp_path.iterdir()) == []


def test_crash_after_a_long_run_restarts_the_count(tmp_path: Path) -> None:
    env = {"LLMTRAIN_RUN_DIR": str(tmp_path), "LLMTRAIN_LAUNCH": "1"}
    for ran_sec in (1.0, 1.0, LONG_RUN_SEC, 1.0):
        count_crash(1, False, ran_sec, env)
    with pytest.raises(TrainingFailed) as caught:
        count_crash(1, False, 1.0, env)
    assert caught.value.exit_code == 65


def test_count_crash_without_writable_directory_does_not_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for _ in range(5):
        count_crash(1, False, 1.0, {"LLMTRAIN_RUN_DIR": str(tmp_path / "file"), "LLMTRAIN_LAUNCH": "1"})
        count_crash(1, False, 1.0, {"LLMTRAIN_LAUNCH": "1"})
        count_crash(1, False, 1.0, {"LLMTRAIN_RUN_DIR": str(tmp_path)})


def test_killed_command_exits_137(tmp_path: Path) -> None:
    done = node(tmp_path, "pytorchjob", "--", "sh", "-c", "kill -9 $$")
    assert done.wait(30) == 137, done.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_forwarded_once(tmp_path: Path, number: int) -> None:
    done = node(tmp_path, "pytorchjob", "--", sys.executable, "-c", TRAINER, 75)
    done.wait_for((tmp_path / "pid").exists)
    done.send(number)
    assert done.wait(20) == 203, done.err
    assert (tmp_path / "signals").read_text() == "x"


def test_ignored_signal_is_not_forwarded(tmp_path: Path) -> None:
    words = ["node", "--", sys.executable, "-c", TRAINER, 7]
    environment = {"LLMTRAIN_EXIT_CODES": "pytorchjob"}
    done = start_cli(*words, env=environment, cwd=tmp_path, before=ignore_as_in_background)
    done.wait_for((tmp_path / "pid").exists)
    done.send(signal.SIGINT)
    time.sleep(limit(0.3))  # for one that would forward it now
    assert not (tmp_path / "signals").exists()
    done.send(signal.SIGTERM)
    assert done.wait(20) == 135, done.err
    assert (tmp_path / "signals").read_text() == "x"


def test_sigterm_while_waiting_for_master_exits_203(tmp_path: Path) -> None:
    """There the process exits from a thread, and its exit code cannot be translated inside it."""
    meeting = ["--nodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    done = node(tmp_path, "pytorchjob", *meeting, "--", "true", LLMTRAIN_DEBUG="1")
    done.wait_for(lambda: "[DDP]" in done.err)
    time.sleep(0.5)
    done.send(signal.SIGTERM)
    assert done.wait(10) == 203, done.err


def test_child_is_terminated_when_supervisor_is_killed(tmp_path: Path) -> None:
    done = node(tmp_path, "pytorchjob", "--", sys.executable, "-c", TRAINER, 75)
    done.wait_for((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    assert pid != done.pid
    done.send(signal.SIGKILL)
    assert done.wait(10) == -9
    wait_until(lambda: not is_alive(pid), 10)
    assert (tmp_path / "signals").exists()


def test_interrupted_killed_and_finished_training_exit_codes(tmp_path: Path, cache: Path) -> None:
    words = ["--config", config_file(tmp_path, cache), "--json"]
    stopped = node(tmp_path, "pytorchjob", *words, LLMTRAIN_FAULT="after_optimizer:3:0:term")
    assert stopped.wait() == 203, stopped.err
    assert json.loads(stopped.out)["exit_code"] == 75, "the report has llmtrain's own code"
    killed = node(tmp_path, "pytorchjob", *words, LLMTRAIN_FAULT="after_optimizer:5:0:kill")
    assert killed.wait() == 137, killed.err
    done = node(tmp_path, "pytorchjob", *words)
    assert done.wait() == 0, done.err
    assert json.loads(done.out)["steps"] == harness.STEPS
    assert not (tmp_path / "runs" / "tiny" / "ended.json").exists()


def test_lost_peer_exits_203(tmp_path: Path, cache: Path) -> None:
    meeting = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    words = [*meeting, "--config", config_file(tmp_path, cache)]
    fault = {"LLMTRAIN_FAULT": "after_optimizer:3:1:kill"}
    nodes = [node(tmp_path, "pytorchjob", "--node-rank", rank, *words, **fault) for rank in (0, 1)]
    assert [one.wait() for one in nodes] == [203, 137], nodes[0].err


def test_config_error_stays_64(tmp_path: Path) -> None:
    done = node(tmp_path, "pytorchjob", "--config", "gpt_smoke", "--set", "trainer.no_such=1", "--json")
    assert done.wait(30) == 64
    assert json.loads(done.out)["error"] == "ConfigError"


def test_unknown_platform_is_refused(tmp_path: Path) -> None:
    done = node(tmp_path, "pytorch_job", "--json", "--", "true")
    assert done.wait(30) == 64
    error = json.loads(done.out)
    assert "LLMTRAIN_EXIT_CODES=pytorch_job" in error["what"]
    assert error["known"] == ["pytorchjob", "statefulset"]


def test_no_platform_runs_command_in_place(tmp_path: Path) -> None:
    done = node(tmp_path, "", "--", sys.executable, "-c", TRAINER, 75)
    done.wait_for((tmp_path / "pid").exists)
    assert int((tmp_path / "pid").read_text()) == done.pid
    done.send(signal.SIGTERM)
    assert done.wait(10) == 75


# StatefulSet: pods are always started again.


@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_finished_script_waits_to_be_removed(tmp_path: Path, number: int) -> None:
    one = node(tmp_path, "statefulset", "--", "true")
    wait_until_idle(one, 0)
    remove(one, number)
    assert list(tmp_path.iterdir()) == [], "a script without a config has no run"


@pytest.mark.parametrize("code", [1, 69, 75])
def test_other_codes_end_as_they_are(tmp_path: Path, code: int) -> None:
    done = node(tmp_path, "statefulset", "--", sys.executable, "-c", f"raise SystemExit({code})")
    assert done.wait(30) == code
    assert IDLE_MARK not in done.err


def test_interrupted_node_does_not_wait_for_deletion(tmp_path: Path) -> None:
    """SIGTERM arrived at the end of the run; there is no second one."""
    done = node(tmp_path, "statefulset", "--", sys.executable, "-c", TRAINER, 0)
    done.wait_for((tmp_path / "pid").exists)
    done.send(signal.SIGTERM)
    assert done.wait(10) == 0
    assert IDLE_MARK not in done.err


@pytest.mark.parametrize(
    "words", some([["--no-such-option"], ["--set", "trainer.no_such=1"], ["--nodes", "0"]], ["--no-such-option"])
)
def test_usage_errors_are_reported_before_waiting(tmp_path: Path, words: list[str]) -> None:
    one = node(tmp_path, "statefulset", "--json", *words)
    wait_until_idle(one, 64)
    assert json.loads(one.out)["exit_code"] == 64
    remove(one)


def test_the_line_is_there_whatever_the_log_looks_like(tmp_path: Path, cache: Path) -> None:
    path = config_file(tmp_path, cache, logging__level="ERROR", logging__json_output=True)
    one = node(tmp_path, "statefulset", "--config", path, "--set", "data.name=text_files", "--set", "data.files=['no']")
    wait_until_idle(one, 65)
    assert record(tmp_path) == {"exit_code": 65, "launch": "1"}
    report = json.loads((tmp_path / "runs" / "tiny" / "ended.json").read_text())["report"]
    assert (report["error"], report["exit_code"]) == ("DataError", 65)
    remove(one)


def test_a_finished_run_is_not_started_again(tmp_path: Path, cache: Path) -> None:
    path = config_file(tmp_path, cache)
    stopped = node(tmp_path, "statefulset", "--config", path, LLMTRAIN_FAULT="after_optimizer:3:0:term")
    assert stopped.wait() == 75, stopped.err
    ended_file = tmp_path / "runs" / "tiny" / "ended.json"
    assert not ended_file.exists()
    first = node(tmp_path, "statefulset", "--config", path, "--json")
    wait_until_idle(first, 0)
    assert json.loads(first.out)["resumed_from"] == 3
    assert record(tmp_path) == {"exit_code": 0, "launch": "1"}
    assert sorted(p.name for p in ended_file.parent.glob(".ended*")) == []
    before = harness.tree(tmp_path / "runs", without=())
    started = time.monotonic()
    again = node(tmp_path, "statefulset", "--config", path, LLMTRAIN_LAUNCH="1")
    wait_until_idle(again, 0)
    assert time.monotonic() - started < limit(5)
    assert "[TRAIN]" not in again.err
    assert harness.tree(tmp_path / "runs", without=()) == before
    more = ["--config", path, "--set", "trainer.max_steps=10"]
    same = node(tmp_path, "statefulset", *more)
    wait_until_idle(same, 0)
    assert "[TRAIN]" not in same.err, "the launch decides, not the config"
    resumed = node(tmp_path, "statefulset", *more, "--json", LLMTRAIN_LAUNCH="2")
    wait_until_idle(resumed, 0)
    assert json.loads(resumed.out)["steps"] == 10
    assert record(tmp_path) == {"exit_code": 0, "launch": "2"}
    for one in (first, again, same, resumed):
        remove(one)


@pytest.mark.parametrize("nodes", some(["1", "2", "1:2"], "1:2"))
def test_a_pod_beyond_the_nodes_of_the_run_waits_and_ends_nothing(tmp_path: Path, cache: Path, nodes: str) -> None:
    """kubectl scale: the pods of the run, which come back now and then, must not take it for ended."""
    path = config_file(tmp_path, cache)
    one = node(tmp_path, "statefulset", "--json", "--config", path, "--nodes", nodes, POD_INDEX="2")
    wait_until_idle(one, 64)
    assert json.loads(one.out)["exit_code"] == 64
    assert not (tmp_path / "runs" / "tiny").exists()
    remove(one)


def test_a_launch_that_failed_leaves_the_next_one_alone(tmp_path: Path, cache: Path) -> None:
    """All it leaves is ended.json, in a directory that is no run yet."""
    words = ["--config", config_file(tmp_path, cache), "--json"]
    failed = node(tmp_path, "statefulset", *words, "--nodes", "3:1")
    wait_until_idle(failed, 64)
    assert [path.name for path in (tmp_path / "runs" / "tiny").iterdir()] == ["ended.json"]
    again = node(tmp_path, "statefulset", *words)
    wait_until_idle(again, 64)
    assert again.out == "", "corrected or not, this launch has ended"
    fixed = node(tmp_path, "statefulset", *words, LLMTRAIN_LAUNCH="2")
    wait_until_idle(fixed, 0)
    result = json.loads(fixed.out)
    assert (result["steps"], result["resumed_from"], result["generation"]) == (harness.STEPS, None, 1)
    assert (tmp_path / "runs" / "tiny" / "meta.json").exists()
    assert record(tmp_path) == {"exit_code": 0, "launch": "2"}
    for one in (failed, again, fixed):
        remove(one)


def test_the_doctor_and_smoke_keep_nothing(tmp_path: Path, cache: Path) -> None:
    """They say nothing about the run, which is yet to be trained."""
    one = node(tmp_path, "statefulset", "--config", config_file(tmp_path, cache), "--smoke", "--json")
    wait_until_idle(one, 0)
    assert json.loads(one.out)["world_size"] == 1
    assert not (tmp_path / "runs").exists()
    remove(one)


def test_two_nodes_that_finished(tmp_path: Path, cache: Path) -> None:
    """Either may come back, and waits for no peer."""
    words = ["--nodes", 2, "--master-addr", "127.0.0.1", "--config", config_file(tmp_path, cache)]
    port = ["--master-port", free_port()]
    nodes = [node(tmp_path, "statefulset", "--node-rank", rank, *words, *port) for rank in (0, 1)]
    for one in nodes:
        wait_until_idle(one, 0)
    for rank in (0, 1):
        remove(nodes[rank])
        back = node(tmp_path, "statefulset", "--node-rank", rank, *words, *port)
        wait_until_idle(back, 0)
        assert "[TRAIN]" not in back.err
        remove(back)


def test_the_peer_of_a_node_that_failed_for_good(tmp_path: Path, cache: Path) -> None:
    """Node 1 has another config, and waits to be removed; node 0 misses it, is started again, and waits as well."""
    path = config_file(tmp_path, cache, distributed__join_timeout_sec=4)
    words = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--config", path]
    first = node(tmp_path, "statefulset", "--node-rank", 0, *words, LLMTRAIN_DEBUG="1")
    first.wait_for(lambda: "[DDP]" in first.err)
    mistaken = node(tmp_path, "statefulset", "--node-rank", 1, *words, "--set", "trainer.grad_accum_steps=1")
    wait_until_idle(mistaken, 64)
    assert record(tmp_path) == {"exit_code": 64, "launch": "1"}
    assert first.wait(60) == 69, first.err
    back = node(tmp_path, "statefulset", "--node-rank", 0, *words)
    wait_until_idle(back, 64)
    for one in (mistaken, back):
        remove(one)


def test_a_volume_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["--config", "gpt_smoke", "--set", "output.root_dir=file/runs", "--set", "output.run_id=tiny"]
    one = node(tmp_path, "statefulset", *words, "--nodes", "0")
    wait_until_idle(one, 64)
    assert "ended.json cannot be written" in one.err
    remove(one)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"launch": "1"}', '{"launch": 1, "exit_code": 0}', '{"launch": "1", "exit_code": 75}'],
)
def test_a_record_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "ended.json").write_text(text)
    assert ended_before(RunDirectory(tmp_path)) is None


# Any platform may start pods again when the run has ended: LLMTRAIN_LAUNCH tells which launch it was.

NOBODY = ("--nodes", 2, "--node-rank", 1, "--master-addr", "192.0.2.1", "--master-port", 29500)


def ended_at_once(folder: Path, platform: str, *words: object, **env: str) -> int:
    """What a node of two ends with that is started alone."""
    started = time.monotonic()
    one = node(folder, platform, *NOBODY, *words, **env)
    code = one.wait(15)
    assert time.monotonic() - started < limit(5)
    assert "has already ended" in one.err
    assert "[TRAIN]" not in one.err
    return code


def look_often() -> None:
    """For starts of other pods, which a rank looks for with each of its beats."""
    from llmtrain.training import watchdog

    watchdog.BEAT_SEC = 0.2


def look_often_and_give_up_soon() -> None:
    from llmtrain.training import watchdog

    watchdog.BEAT_SEC = 0.2
    watchdog.MIN_STALL_SEC = 1.0


def test_peer_of_replaced_node_exits_without_timeout(tmp_path: Path, cache: Path) -> None:
    """Its node lost the network: connections stay open, and only its new start shows it, long before timeout_sec."""
    path = config_file(tmp_path, cache, distributed__timeout_sec=600)
    meeting = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    words = ["--config", path]
    frozen = node(
        tmp_path, "", *meeting, "--node-rank", 0, *words, LLMTRAIN_LAUNCH="1", LLMTRAIN_FAULT="after_backward:3:0:stop"
    )
    of_left = ("--node-rank", 1, *words)
    left = node(tmp_path, "", *meeting, *of_left, LLMTRAIN_LAUNCH="1", before=look_often_and_give_up_soon)
    folder = tmp_path / "runs" / "tiny" / "heartbeats"
    left.wait_for(lambda: (read_heartbeats(folder).get(1) or {"step": 0})["step"] >= 2)
    time.sleep(2)  # it waits without logging
    assert not left.is_over()
    announce_start(folder, 0)
    assert left.wait(15) == 75, left.err
    assert "Pod 0 of the run was replaced" in left.err
    frozen.send(signal.SIGKILL)
    frozen.wait()


def test_stale_start_does_not_interrupt_running_nodes(tmp_path: Path, cache: Path) -> None:
    """A replaced pod may restart on its old node: running nodes ignore it while they take steps together."""
    path = config_file(tmp_path, cache, trainer__max_steps=60, trainer__save_every_steps=20)
    meeting = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port(), "--config", path]
    nodes = [
        node(tmp_path, "", *meeting, "--node-rank", rank, LLMTRAIN_LAUNCH="1", before=look_often) for rank in (0, 1)
    ]
    folder = tmp_path / "runs" / "tiny" / "heartbeats"
    nodes[1].wait_for(lambda: (read_heartbeats(folder).get(1) or {"step": 0})["step"] >= 1)
    announce_start(folder, 0)
    assert [one.wait(120) for one in nodes] == [0, 0], nodes[1].err


def test_two_nodes_of_a_launch_that_finished(tmp_path: Path, cache: Path) -> None:
    path = config_file(tmp_path, cache)
    meeting = ["--nodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    words = ["--config", path]
    nodes = [node(tmp_path, "", *meeting, "--node-rank", rank, *words, LLMTRAIN_LAUNCH="1-ab") for rank in (0, 1)]
    assert [one.wait() for one in nodes] == [0, 0], nodes[0].err
    assert record(tmp_path) == {"exit_code": 0, "launch": "1-ab"}
    for platform in ("", "pytorchjob"):
        assert ended_at_once(tmp_path, platform, *words, LLMTRAIN_LAUNCH="1-ab") == 0
    more = ["--set", "trainer.max_steps=9", "--json"]
    resumed = node(tmp_path, "", *words, *more, LLMTRAIN_LAUNCH="2-ab")
    assert resumed.wait() == 0, resumed.err
    assert json.loads(resumed.out)["steps"] == 9, "another launch goes on"
    assert record(tmp_path) == {"exit_code": 0, "launch": "2-ab"}


@pytest.mark.parametrize(
    ("mistake", "code"),
    [(["--nodes", "3:1"], 64), (["--set", "data.name=text_files", "--set", "data.files=['no']"], 65)],
)
@pytest.mark.parametrize("platform", some(["", "pytorchjob"], ""))
def test_a_launch_that_failed_for_good(
    tmp_path: Path, cache: Path, platform: str, mistake: list[str], code: int
) -> None:
    words = ["--config", config_file(tmp_path, cache)]
    assert node(tmp_path, platform, *words, *mistake, LLMTRAIN_LAUNCH="1").wait() == code
    assert record(tmp_path) == {"exit_code": code, "launch": "1"}
    assert ended_at_once(tmp_path, platform, *words, LLMTRAIN_LAUNCH="1") == code
    if platform:
        return
    fixed = node(tmp_path, platform, *words, LLMTRAIN_LAUNCH="2")
    assert fixed.wait() == 0, fixed.err


def test_a_launch_that_can_go_on_keeps_no_end(tmp_path: Path, cache: Path) -> None:
    words = ["--config", config_file(tmp_path, cache)]
    interrupted = node(tmp_path, "", *words, LLMTRAIN_LAUNCH="1", LLMTRAIN_FAULT="after_optimizer:3:0:term")
    assert interrupted.wait() == 75, interrupted.err
    assert not (tmp_path / "runs" / "tiny" / "ended.json").exists()
    assert f"llmtrain resume {harness.RUN_ID}" in interrupted.err, "the command for a launched run"
    done = node(tmp_path, "", *words, LLMTRAIN_LAUNCH="1")
    assert done.wait() == 0, done.err


@pytest.mark.parametrize("words", [[], ["--nodes", "3:1"]], ids=["finished", "mistaken"])
def test_nothing_is_kept_where_nobody_launched_it(tmp_path: Path, cache: Path, words: list[str]) -> None:
    done = node(tmp_path, "", "--config", config_file(tmp_path, cache), *words)
    assert done.wait() == (64 if words else 0), done.err
    assert list(tmp_path.rglob("ended.json")) == []


# Errors of the init container (LLMTRAIN_PREFETCHED)


def prefetched(folder: Path) -> str:
    from llmtrain.errors import DataError

    error = DataError("dataset somebody/rows has no split 'vall'.", known=["train", "val"], remedy="Name another.")
    error.details["split"] = "vall"
    (folder / "prefetch.json").write_text(json.dumps(error.as_dict()))
    return str(folder / "prefetch.json")


@pytest.mark.parametrize("platform", ["", "pytorchjob"])
@pytest.mark.parametrize("words", [[], ["--processes-per-node", 2]], ids=["one", "two"])
def test_prefetch_error_ends_node(tmp_path: Path, cache: Path, platform: str, words: list[object]) -> None:
    report = prefetched(tmp_path)
    done = node(
        tmp_path, platform, "--config", config_file(tmp_path, cache), "--json", *words, LLMTRAIN_PREFETCHED=report
    )
    assert done.wait(30) == 65, done.err
    assert json.loads(done.out) == {**json.loads(Path(report).read_text()), "reason": "prefetch"}
    assert "has no split 'vall'" in done.err
    assert "Name another." in done.err
    assert "[TRAIN]" not in done.err
    assert not (tmp_path / "runs").exists()


def test_prefetch_error_in_stateful_set(tmp_path: Path, cache: Path) -> None:
    words = ["--config", config_file(tmp_path, cache)]
    one = node(tmp_path, "statefulset", *words, LLMTRAIN_PREFETCHED=prefetched(tmp_path), LLMTRAIN_LAUNCH="3")
    wait_until_idle(one, 65)
    assert record(tmp_path) == {"exit_code": 65, "launch": "3"}
    remove(one)


def test_prefetch_without_error_trains(tmp_path: Path, cache: Path) -> None:
    words = ["--config", config_file(tmp_path, cache)]
    done = node(tmp_path, "", *words, LLMTRAIN_PREFETCHED=str(tmp_path / "prefetch.json"))
    assert done.wait() == 0, done.err


# A finished run that is started again


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    done = node(folder, "", "--config", config_file(folder, cache))
    assert done.wait() == 0, done.err
    return folder


def test_finished_run_with_changed_config_is_refused(finished: Path) -> None:
    before = harness.tree(finished / "runs", without=())
    words = ["--config", finished / "train.json", "--set", "trainer.lr=1e-4", "--set", "run.seed=9", "--json"]
    done = node(finished, "", *words)
    assert done.wait() == 64, done.err
    error = json.loads(done.out)
    assert "run.seed: 7 -> 9, trainer.lr: 0.003 -> 0.0001" in error["what"]
    assert "output.run_id" in error["remedy"]
    assert harness.tree(finished / "runs", without=()) == before


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["logging.level=DEBUG", "run.threads=2", "launch.nodes=4", "trainer.keep_checkpoints=9"],
        ["trainer.max_steps=4"],
        ["run.threads=null"],
    ],
    ids=["same", "what may change", "fewer steps", "threads left open"],
)
def test_finished_run_is_not_trained_again(finished: Path, sets: list[str]) -> None:
    words = [word for text in sets for word in ("--set", text)]
    done = node(finished, "", "--config", finished / "train.json", *words, "--json")
    assert done.wait() == 0, done.err
    assert json.loads(done.out)["steps"] == harness.STEPS
    assert "is finished already, at step" in done.err


def test_finished_run_with_unreadable_config(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "runs", tmp_path / "runs")
    (tmp_path / "runs" / harness.RUN_ID / "config.yaml").write_text("")
    words = ["--config", finished / "train.json", "--set", f"output.root_dir={tmp_path / 'runs'}"]
    done = node(tmp_path, "", *words)
    assert done.wait() == 0, done.err
