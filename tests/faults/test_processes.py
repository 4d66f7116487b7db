"""The real command: python -m llmtrain train, signals from outside, exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fault_harness as harness
import pytest
from fault_harness import RUN_ID, Outcome, outcome, steps_saved
from rank_harness import start_cli

from fork_server import ignore_as_in_background, is_stopped
from limits import wait_until
from llmtrain.config.load import dump_config
from llmtrain.config.schema import Config

MakeConfig = Callable[..., Config]


@pytest.fixture
def file(tmp_path: Path, config: Config) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    return path


def start(*arguments: str, fault: str | None = None, **options: object) -> "subprocess.Popen[str]":
    env = {key: value for key, value in os.environ.items() if key != "LLMTRAIN_FAULT"}
    if fault:
        env["LLMTRAIN_FAULT"] = fault
    command = [sys.executable, "-m", "llmtrain", "train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options)  # type: ignore[call-overload]


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate()
    finally:
        process.kill()
    return process.returncode, stdout, stderr


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    def is_so() -> bool:
        assert process.poll() is None, process.communicate()
        return condition()

    wait_until(is_so)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_then_resume(file: Path, root: Path, golden: Outcome, number: signal.Signals) -> None:
    """The process stops itself in step 3, so that it receives the signal there."""
    process = start("--config", str(file), fault="after_backward:3:0:stop")
    wait_for(process, lambda: is_stopped(process.pid))
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    code, stdout, stderr = finish(process)
    assert code == 75, stderr
    assert f"{number.name}: saving and stopping" in stderr
    assert f"llmtrain train --resume {root / RUN_ID}" in stderr
    assert stdout == ""
    assert steps_saved(root) == [2, 3]

    done = start_cli("train", "--config", file, "--resume", RUN_ID, "--json")
    assert done.wait() == 0, done.err
    result = json.loads(done.out)
    assert result["resumed_from"] == 3
    assert outcome(root, result) == golden


def test_closed_terminal_saves(config: Config, root: Path) -> None:
    child = harness.start(config, fault="after_backward:3:0:stop")
    child.wait_stopped()
    child.send(signal.SIGHUP)
    child.send(signal.SIGCONT)
    ended = child.wait()
    assert (ended.code, steps_saved(root)) == (75, [2, 3]), ended.output


@pytest.mark.parametrize("last", [signal.SIGHUP, signal.SIGTERM])
def test_ignored_signals_stay_ignored_and_sigterm_saves(config: Config, root: Path, last: signal.Signals) -> None:
    """As under `nohup llmtrain train ... &` in a script."""
    child = harness.start(config, fault="after_backward:3:0:stop", before=ignore_as_in_background)
    child.wait_stopped()
    for number in (signal.SIGINT, last, signal.SIGCONT):
        child.send(number)
    ended = child.wait()
    assert ended.code == (75 if last == signal.SIGTERM else 0), ended.output
    assert steps_saved(root)[-1] == (3 if last == signal.SIGTERM else harness.STEPS)


@pytest.mark.slow
def test_resume_needs_no_config(file: Path, root: Path, golden: Outcome) -> None:
    code, stdout, stderr = finish(start("--config", str(file), "--json", fault="after_optimizer:3:0:term"))
    assert code == 75, stderr
    assert json.loads(stdout)["exit_code"] == 75
    code, stdout, stderr = finish(start("--resume", str(root / RUN_ID / "checkpoints" / "step_2.pt"), "--json"))
    assert code == 0, stderr
    assert outcome(root, json.loads(stdout)) == golden


def test_sigterm_while_torch_is_imported(file: Path, root: Path) -> None:
    """Startup takes seconds: SIGTERM during it must not look like a crash."""
    process = start("--config", str(file))
    maps = Path(f"/proc/{process.pid}/maps")
    wait_for(process, lambda: "libtorch" in maps.read_text())
    process.send_signal(signal.SIGTERM)
    code, _, stderr = finish(process)
    assert code == 75, (code, stderr)
    assert steps_saved(root) == []


@pytest.mark.slow
def test_sigkill_then_resume(file: Path, root: Path, golden: Outcome) -> None:
    assert finish(start("--config", str(file), fault="save_before_rename:6:0:kill"))[0] == -9
    code, stdout, stderr = finish(start("--config", str(file), "--resume", "auto", "--json"))
    assert code == 0, stderr
    assert outcome(root, json.loads(stdout)) == golden


@pytest.mark.parametrize("reference", ["../evil", "payload.pt"])
def test_resume_refuses_a_bad_reference(file: Path, tmp_path: Path, reference: str) -> None:
    done = start_cli("train", "--config", file, "--resume", reference, cwd=tmp_path)
    assert done.wait() in (64, 65), done.err
    assert "Traceback" not in done.err


def children_of(pid: int) -> list[int]:
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_data_workers_exit_with_the_trainer(tmp_path: Path, make_config: MakeConfig, number: signal.Signals) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(data__num_workers=1)))
    trainer = start("--config", str(path))

    def workers() -> list[int]:
        with contextlib.suppress(OSError):
            return [
                pid for pid in children_of(trainer.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
        return []

    started = wait_until(lambda: workers() or trainer.poll() is not None)
    assert isinstance(started, list), trainer.communicate()
    trainer.send_signal(number)
    code, _, stderr = finish(trainer)
    assert code == (-9 if number == signal.SIGKILL else 75), stderr
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


CRASHING = """
import sys
import llmtrain.training.run as run
def crash(*_): raise RuntimeError("a bug")
run.build_result = crash
from llmtrain.cli import main
main(["train", "--config", sys.argv[1]])
"""


@pytest.mark.slow
def test_crash_with_data_workers_exits(tmp_path: Path, make_config: MakeConfig) -> None:
    """The workers ignore SIGTERM, which Python sends them at exit: it would wait forever."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(make_config(data__num_workers=2)))
    done = subprocess.run([sys.executable, "-c", CRASHING, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a bug" in done.stderr
