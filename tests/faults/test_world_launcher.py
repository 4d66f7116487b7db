"""Faults under the real launchers, `train --processes` and `node`: restarts, exit codes, no leftover processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_harness import RUN_ID, Outcome, outcome, read_result, steps_saved

from limits import limit, wait_until
from llmtrain.config.load import dump_config
from llmtrain.config.schema import Config
from llmtrain.runs.heartbeats import read_heartbeats

MakeConfig = Callable[..., Config]
MARK = "LLMTRAIN_TEST_MARK"
_started: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    """Every process that a test starts has its mark; none may remain when the test ends."""
    yield
    for process in _started:
        process.kill()
        process.wait()
    _started.clear()
    leftovers = marked(str(tmp_path))
    for pid in leftovers:
        os.kill(pid, signal.SIGKILL)
    assert leftovers == []


def marked(mark: str) -> list[int]:
    expected = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and expected in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture
def file(tmp_path: Path, world_config: Config) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(world_config))
    return path


def start(file: Path, *arguments: str, fault: str | None = None, own_session: bool = False) -> "subprocess.Popen[str]":
    verb, *rest = arguments
    command = [sys.executable, "-m", "llmtrain", verb, "--config", str(file), *rest]
    env = {**os.environ, MARK: str(file.parent)}
    if fault:
        env["LLMTRAIN_FAULT"] = fault
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=own_session
    )
    _started.append(process)
    return process


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    stdout, stderr = process.communicate()
    return process.returncode, stdout, stderr


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], Any]) -> None:
    def is_so() -> Any:
        assert process.poll() is None, process.communicate()
        return condition()

    wait_until(is_so)


def wait_until_held(process: "subprocess.Popen[str]", root: Path, rank: int, generation: int = 1) -> int:
    """Wait until a rank has stopped itself; returns its process id."""
    heartbeats = root / RUN_ID / "heartbeats"
    wait_for(process, lambda: read_heartbeats(heartbeats).get(rank, {}).get("generation") == generation)
    pid = int(read_heartbeats(heartbeats)[rank]["pid"])
    wait_for(process, lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return pid


def generations(root: Path) -> list[dict[str, Any]]:
    path = root / RUN_ID / "generations.json"
    return list(json.loads(path.read_text())) if path.exists() else []


NODE = ("node", "--processes-per-node", "2")


@pytest.mark.parametrize(
    ("arguments", "fault", "from_step"),
    [
        ((*NODE, "--max-restarts", "2"), "after_backward:5:1:kill:0", 4),
        pytest.param((*NODE, "--max-restarts", "2"), "save_before_rename:6:0:kill:0", 4, marks=pytest.mark.slow),
        pytest.param(("train", "--processes", "2"), "after_backward:5:0:kill:0", 4, marks=pytest.mark.slow),
        pytest.param(("train", "--processes", "2"), "forward:1:1:kill:0", 0, marks=pytest.mark.slow),
        pytest.param(("train", "--processes", "2"), "save_model_written:4:1:kill:0", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_rank_is_restarted(
    file: Path, root: Path, world_golden: Outcome, arguments: tuple[str, ...], fault: str, from_step: int
) -> None:
    code, stdout, stderr = finish(start(file, *arguments, "--json", fault=fault))
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["resumed_from"] == (from_step or None)
    assert outcome(root, result) == world_golden
    assert stderr.count("Restarting the processes") == 1
    assert [row["from_step"] for row in generations(root)] == [0, from_step]
    assert {beat["generation"] for beat in read_heartbeats(root / RUN_ID / "heartbeats").values()} == {2}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_sigkill_from_outside_restarts(file: Path, root: Path, world_golden: Outcome, rank: int) -> None:
    """Rank 1 is held inside step 5, where one of the two is killed."""
    process = start(file, *NODE, "--max-restarts", "2", fault="after_backward:5:1:stop:0")
    wait_until_held(process, root, rank=1)
    os.kill(read_heartbeats(root / RUN_ID / "heartbeats")[rank]["pid"], signal.SIGKILL)
    code, _, stderr = finish(process)
    assert code == 0, stderr
    assert outcome(root, read_result(root)) == world_golden


@pytest.mark.slow
def test_hanging_rank_is_restarted(
    tmp_path: Path, make_world_config: MakeConfig, root: Path, world_golden: Outcome
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(make_world_config(distributed__timeout_sec=3)))
    started = time.monotonic()
    code, _, stderr = finish(start(file, *NODE, "--max-restarts", "1", fault="after_backward:5:0:stop:0"))
    assert code == 0, stderr
    assert re.search(r"rank 0 .*\(pid ", stderr), stderr
    assert outcome(root, read_result(root)) == world_golden
    # torch gives the stopped worker 30 s before it kills it
    assert time.monotonic() - started < 30 + limit(70)


@pytest.mark.slow
def test_gives_up_after_three_crashes_without_progress(file: Path, root: Path) -> None:
    code, _, stderr = finish(start(file, *NODE, "--max-restarts", "9", fault="forward:1:1:kill"))
    assert code == 65, stderr
    assert "crashed 3 times in a row without a newer checkpoint than step 0" in stderr
    assert stderr.count("Restarting the processes") == 3
    assert len(generations(root)) == 3


@pytest.mark.parametrize(
    ("fault", "resumed_from"),
    [
        pytest.param("prepare:0:0:kill:0", 4, marks=pytest.mark.slow),
        pytest.param("prepare:0:1:kill:0", 4, marks=pytest.mark.slow),
        pytest.param("forward:5:0:kill:0", 4, marks=pytest.mark.slow),
        pytest.param("forward:7:0:kill:0", 6, marks=pytest.mark.slow),
    ],
)
def test_restart_uses_the_named_checkpoint_until_it_was_loaded(
    file: Path, root: Path, world_golden: Outcome, fault: str, resumed_from: int
) -> None:
    """After a crash before that, the restart must not use the newest checkpoint, which the resume is to replace."""
    code, _, stderr = finish(start(file, "train", "--processes", "2"))
    assert code == 0, stderr
    named = root / RUN_ID / "checkpoints" / "step_4"
    again = start(file, "train", "--processes", "2", "--resume", str(named), "--json", fault=fault)
    code, stdout, stderr = finish(again)
    assert code == 0, stderr
    assert stderr.count("Restarting the processes") == 1
    assert json.loads(stdout)["resumed_from"] == resumed_from
    assert outcome(root, read_result(root)) == world_golden


@pytest.mark.slow
def test_gives_up_after_three_crashes_during_data_preparation(file: Path, root: Path) -> None:
    for command in (NODE, ("train", "--processes", "2")):
        code, _, stderr = finish(start(file, *command, "--max-restarts", "9", fault="prepare:0:1:kill"))
        assert code == 65, stderr
        assert stderr.count("Restarting the processes") == 3
        reports = [json.loads(path.read_text()) for path in (root / RUN_ID / "exits").glob("*.json")]
        shutil.rmtree(root / RUN_ID)
    assert [(report["exit_code"], report["reason"]) for report in reports] == [(65, "gave_up")]  # of the second command


@pytest.mark.slow
def test_crashes_of_restarted_pods_are_counted(file: Path, root: Path) -> None:
    """A platform restarts the pod: crashes are counted per run, not per process."""
    for _ in range(3):
        code, _, stderr = finish(start(file, *NODE, fault="after_backward:3:0:kill"))
        assert code == 128 + signal.SIGKILL, stderr
    # The first one came to step 2, so only the second and the third count, and the next is the third in a row.
    assert [row["from_step"] for row in generations(root)] == [0, 2, 2]
    code, _, stderr = finish(start(file, *NODE, fault="after_backward:3:0:kill"))
    assert code == 128 + signal.SIGKILL, stderr
    code, _, stderr = finish(start(file, *NODE))
    assert code == 65, stderr
    assert "crashed 3 times in a row without a newer checkpoint than step 2" in stderr


@pytest.mark.slow
def test_sigterm_is_not_counted_as_a_crash(file: Path, root: Path, world_golden: Outcome) -> None:
    """Three starts are interrupted in their first step; the fourth finishes."""
    for number in range(3):
        process = start(file, *NODE, "--max-restarts", "2", fault=f"after_backward:{number + 1}:0:stop")
        held = wait_until_held(process, root, rank=0, generation=number + 1)
        process.send_signal(signal.SIGTERM)
        wait_for(process, lambda pid=held: is_told(pid))
        os.kill(held, signal.SIGCONT)
        code, _, stderr = finish(process)
        assert code == 75, stderr
    assert {row["ended"] for row in generations(root)} == {"stopped"}
    code, _, stderr = finish(start(file, *NODE, "--max-restarts", "2"))
    assert code == 0, stderr
    assert outcome(root, read_result(root)) == world_golden


@pytest.mark.slow
def test_repeated_sigterm_still_saves(file: Path, root: Path) -> None:
    """A second SIGTERM must not prevent the save."""
    process = start(file, *NODE, "--max-restarts", "2", fault="after_backward:3:0:stop")
    held = wait_until_held(process, root, rank=0)
    process.send_signal(signal.SIGTERM)
    wait_for(process, lambda: is_told(held))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)  # for a launcher that would kill its workers now
    os.kill(held, signal.SIGCONT)
    code, _, stderr = finish(process)
    assert code == 75, stderr
    assert steps_saved(root)[-1] == 3
    assert generations(root)[-1]["ended"] == "stopped"


def is_told(pid: int, number: signal.Signals = signal.SIGTERM) -> bool:
    """Whether a signal is pending for a stopped process."""
    status = Path(f"/proc/{pid}/status").read_text()
    pending = next(line for line in status.splitlines() if line.startswith("ShdPnd"))
    return bool(int(pending.split()[1], 16) & 1 << number - 1)


@pytest.mark.slow
def test_ctrl_c_saves_and_exits(file: Path, root: Path, world_golden: Outcome) -> None:
    """A terminal sends it to the process group of the launcher, which forwards it to its workers."""
    process = start(file, "train", "--processes", "2", fault="after_backward:3:0:stop:0", own_session=True)
    held = wait_until_held(process, root, rank=0)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(process, lambda: is_told(held, signal.SIGINT))
    os.kill(held, signal.SIGCONT)
    code, _, stderr = finish(process)
    assert code == 75, stderr
    assert steps_saved(root)[-1] == 3
    code, stdout, stderr = finish(start(file, "train", "--processes", "2", "--resume", RUN_ID, "--json"))
    assert code == 0, stderr
    assert json.loads(stdout)["resumed_from"] == 3
    assert outcome(root, json.loads(stdout)) == world_golden


@pytest.mark.slow
def test_second_ctrl_c_does_not_wait_for_the_workers(file: Path, root: Path) -> None:
    """Rank 0 is stopped in step 3, so it cannot save; both workers are gone when the launcher is."""
    process = start(file, "train", "--processes", "2", fault="after_backward:3:0:stop:0", own_session=True)
    held = wait_until_held(process, root, rank=0)
    os.killpg(process.pid, signal.SIGINT)
    wait_for(process, lambda: is_told(held, signal.SIGINT))
    process.send_signal(signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 75, stderr
    assert "Traceback" not in stderr
    assert steps_saved(root)[-1] == 2
    command = Path(f"/proc/{held}/cmdline")
    wait_until(lambda: not command.exists() or not command.read_bytes(), 30)


@pytest.mark.slow  # without: test_only_crashes_are_restarted of tests/distributed/test_node.py
def test_sigterm_is_not_restarted(file: Path, root: Path) -> None:
    """A worker that received SIGTERM is not restarted, and node exits with its 75."""
    code, stdout, stderr = finish(start(file, *NODE, "--max-restarts", "2", "--json", fault="after_backward:3:1:term"))
    assert code == 75, stderr
    assert json.loads(stdout)["error"] == "Interrupted"
    assert "step 3" in stderr
    assert "Restarting the processes" not in stderr
    assert steps_saved(root)[-1] == 3


@pytest.mark.slow
def test_nan_exits_65(file: Path, root: Path) -> None:
    code, stdout, stderr = finish(start(file, *NODE, "--max-restarts", "2", "--json", fault="loss:3:1:nan"))
    assert code == 65, stderr
    assert "samples 16 to 23" in json.loads(stdout)["what"]
    assert "Restarting the processes" not in stderr
    assert steps_saved(root) == [2]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["trainer.grad_accum_steps=3", "trainer.lr=-1", "model.name=gtp"])
def test_bad_config_exits_64(file: Path, root: Path, setting: str) -> None:
    code, _, stderr = finish(start(file, *NODE, "--max-restarts", "2", "--set", setting))
    assert code == 64, stderr
    assert "Restarting the processes" not in stderr
    assert "Traceback" not in stderr
    assert not (root / RUN_ID).exists()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["agent", "workers"])
def test_sigterm_during_startup(file: Path, tmp_path: Path, root: Path, when: str) -> None:
    """While the agent or its workers import torch: not a crash, and no leftover processes."""
    process = start(file, *NODE, "--max-restarts", "2")

    def is_there() -> bool:
        pids = marked(str(tmp_path))
        if when == "agent":
            return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
        return len(pids) == 3 and all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)

    wait_for(process, is_there)
    process.send_signal(signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == 75, (code, stderr)
    assert steps_saved(root) == []


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6])
def test_sigterm_at_any_time_during_startup(file: Path, tmp_path: Path, delay: float) -> None:
    """From the moment the agent has signal handlers (it logs the rendezvous address) until training runs."""
    process = start(file, *NODE, "--max-restarts", "2")
    assert process.stderr is not None
    for line in process.stderr:
        if "rendezvous" in line:
            break
    time.sleep(delay)  # a sweep over moments, not a synchronisation
    process.send_signal(signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code in (75, 0), (code, stderr)
    assert marked(str(tmp_path)) == []


# The signal comes while the main thread is inside C code: only the thread that listens for signals hears it.
SIGTERM_AT_WORKER_START = """
import ctypes, os, signal, sys
from llmtrain.distributed import agent
start_workers = agent.NodeAgent._start_workers
def told_meanwhile(self, group):
    ids = start_workers(self, group)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    os.kill(os.getpid(), signal.SIGTERM)
    ctypes.CDLL(None).usleep(500_000)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return ids
agent.NodeAgent._start_workers = told_meanwhile
from llmtrain.cli import main
main(sys.argv[1:])
"""
# The workers are there but have not begun to listen for signals: they die of the one that is passed on to them.
SIGTERM_BEFORE_HANDLERS = """
import os, signal, sys
from llmtrain.distributed import agent
initialize = agent.NodeAgent._initialize_workers
def told_after(self, group):
    initialize(self, group)
    os.kill(os.getpid(), signal.SIGTERM)
agent.NodeAgent._initialize_workers = told_after
from llmtrain.cli import main
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", [SIGTERM_AT_WORKER_START, SIGTERM_BEFORE_HANDLERS], ids=["as_they_start", "before_they_listen"]
)
def test_sigterm_right_after_the_workers_start(file: Path, tmp_path: Path, script: str) -> None:
    command = [sys.executable, "-c", script, *NODE, "--config", str(file), "--max-restarts", "2"]
    env = {**os.environ, MARK: str(tmp_path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    _started.append(process)
    code = process.wait()
    # A process that received SIGTERM exits soon; one that did not would wait for others.
    wait_until(lambda: marked(str(tmp_path)) == [], 5)
    assert code == 75, process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_nan_during_a_save_exits_cleanly(
    tmp_path: Path, make_world_config: MakeConfig, root: Path, async_save: bool
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(make_world_config(trainer__async_save=async_save)))
    code, _, stderr = finish(start(file, *NODE, "--max-restarts", "2", fault="loss:3:1:nan"))
    assert code == 65, stderr
    assert "Restarting the processes" not in stderr
    assert not (root / RUN_ID / "finished.json").exists()
