"""`llmtrain sweep` as users run it: a driver and processes, of which any may be killed."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from sweep_workers import MakeSweep

from limits import limit, wait_until
from llmtrain.errors import ExitCode
from llmtrain.runs.lock import is_held, owner_pid
from llmtrain.sweep.jobs import bracket_jobs
from llmtrain.sweep.local import LocalWorkers
from llmtrain.sweep.outcome import GPU_MEMORY
from llmtrain.sweep.record import SweepDirectory

SPACE = "trainer.lr=log(1e-3,1e-1) trainer.weight_decay=[0.0,0.1,0.5]"
LONG = ["trainer.max_steps=36", "trainer.schedule=wsd", "trainer.schedule_steps=36", "trainer.log_every_steps=2"]


class Driver:
    """A command line in the directory of a test."""

    def __init__(self, folder: Path, tiny: list[str]) -> None:
        self.folder = folder
        self._sets = [part for text in tiny for part in ("--set", text)]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        # -P: no directory of the test is a package. A session of its own: a test can end all that it started.
        command = [sys.executable, "-P", "-m", "llmtrain", "sweep", *words]
        return subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def new(self, *words: str) -> "subprocess.Popen[str]":
        return self.start("--config", "gpt_smoke", "--name", "demo", *self._sets, *words)

    def resume(self, *words: str) -> "subprocess.Popen[str]":
        return self.start("--resume", "demo", "--json", *words)

    @property
    def sweep(self) -> SweepDirectory:
        return SweepDirectory(self.folder / "runs" / "demo")

    def owners(self) -> list[int]:
        """Processes of trials."""
        pids = [owner_pid(path) for path in self.folder.glob("runs/demo-*/lock")]
        return [pid for pid in pids if pid is not None]


def finish(process: "subprocess.Popen[str]") -> tuple[str, str]:
    out, err = process.communicate(timeout=limit(300))
    assert process.returncode == 0, err
    return out, err


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_driver_that_is_killed_takes_over_its_trials(workdir: Path, tiny: list[str]) -> None:
    driver = Driver(workdir, tiny)
    first = driver.new("--space", "trainer.lr=[0.01,0.02]", "--search", "grid", "--parallel", "2", "--json")
    wait_until(lambda: len(list(driver.sweep.path.glob("logs/*.log"))) == 2, 60)
    first.kill()
    first.communicate()
    out, err = finish(driver.resume("--parallel", "1"))
    table: dict[str, Any] = json.loads(out)
    assert [row["status"] for row in table["rows"]] == ["finished", "finished"], err
    for number in (0, 1):  # each was started once: the second driver waited for it
        starts = json.loads((workdir / "runs" / f"demo-{number}" / "generations.json").read_text())
        assert len(starts) == 1
    assert not is_held(driver.sweep.lock)
    # A sweep that is complete has nothing left to do.
    again = json.loads(finish(driver.resume())[0])
    assert again == table


@pytest.mark.slow
def test_interrupted_sweep_saves_its_trials_and_continues(workdir: Path, tiny: list[str]) -> None:
    driver = Driver(workdir, [*tiny, "trainer.max_steps=100000", "trainer.save_every_steps=null"])
    first = driver.new("--seeds", "2", "--parallel", "2")
    wait_until(lambda: len(driver.owners()) == 2, 120)
    wait_until(
        lambda: [path.stat().st_size > 0 for path in workdir.glob("runs/demo-*/metrics.jsonl")] == [True] * 2, 120
    )
    second = driver.resume()  # one driver at a time
    assert second.wait(limit(60)) == ExitCode.USAGE
    assert "demo" in (second.communicate()[0])
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=limit(120))
    assert first.returncode == ExitCode.INTERRUPTED, err
    assert "--resume demo" in err
    assert driver.owners() == []
    assert len(list(workdir.glob("runs/demo-*/checkpoints/step_*"))) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_table_is_the_same_on_1_2_and_4_workers_and_after_ten_kills(workdir: Path, tiny: list[str]) -> None:
    words = ["--space", SPACE, "--trials", "9", "--halving", "4", "--seeds", "2", "--json"]
    tables = {}
    for parallel in ("1", "2", "4"):
        folder = workdir / parallel
        folder.mkdir()
        driver = Driver(folder, [*tiny, *LONG])
        finish(driver.new(*words, "--parallel", parallel))
        tables[parallel] = driver.sweep.table.read_text()
    assert json.loads(tables["1"])["rungs"] == [4, 12, 36]
    assert tables["1"] == tables["2"] == tables["4"]

    folder = workdir / "killed"
    folder.mkdir()
    driver = Driver(folder, [*tiny, *LONG])
    process = driver.new(*words, "--parallel", "4")
    wait_until(driver.sweep.is_sweep, 60)
    chance = random.Random(38)
    kills = {"trial": 0, "driver": 0}
    while sum(kills.values()) < 10:
        wait_until(lambda: bool(driver.owners()) or driver.sweep.table.exists(), 120)
        time.sleep(chance.uniform(0.0, 1.0))
        owners = driver.owners()
        assert not driver.sweep.table.exists(), f"only {kills} before the end"
        if owners and chance.random() < 0.6:
            kill(chance.choice(owners))
            kills["trial"] += 1
        else:
            process.kill()
            process.communicate()
            kills["driver"] += 1
            if chance.random() < 0.3:
                for pid in driver.owners():
                    kill(pid)
            process = driver.resume("--parallel", chance.choice(["2", "4"]))
    finish(process)
    assert min(kills.values()) > 1
    assert driver.sweep.table.read_text() == tables["1"]


def test_memory_of_a_shared_gpu_is_no_outcome(make_sweep: MakeSweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trials on one GPU: alone, each of them might fit."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sweep = make_sweep()
    workers = LocalWorkers(sweep.directory, "cuda", "")
    jobs = bracket_jobs(sweep.budget, sweep.directory.read_state(), range(2))
    reasons = []
    for job in jobs:
        workers.start(job, Path("missing.yaml"))
        sweep.directory.printed(job.run_id).write_text(json.dumps({"error": "x", "reason": GPU_MEMORY}))
        reasons.append(workers.error(job).get("reason"))
    assert reasons == [GPU_MEMORY, None]
    assert workers.error(jobs[0])["exit_code"] == ExitCode.FAILED
    workers.end_all()


@pytest.mark.slow
def test_python_example_of_the_page_runs(workdir: Path, repo: Path) -> None:
    text = (repo / "docs" / "sweeps.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=workdir, capture_output=True, text=True, timeout=limit(200))
    assert done.returncode == 0, done.stderr
    assert "trainer.lr" in done.stdout
    table = json.loads((workdir / "runs" / "tried" / "table.json").read_text())
    assert table["is_complete"]
