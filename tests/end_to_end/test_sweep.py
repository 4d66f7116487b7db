"""A sweep on a real cluster: each trial a run of its own, promoted by a resume, with a driver that is killed."""

import json
import time

import pytest
from kube import SMALL, Kube

from llmtrain import registry
from llmtrain.errors import ExitCode

pytestmark = pytest.mark.slow
STEPS = ["trainer.max_steps=12", "trainer.schedule=constant", "trainer.warmup_steps=2", "run.threads=1"]
STEPS += ["trainer.grad_accum_steps=2", "launch.nodes=1", "launch.runs_volume.claim=runs", "launch.kind=indexed_job"]
SPACE = "trainer.lr=[0.001,0.01,0.1]"


def words(kube: Kube, *more: str) -> list[str]:
    sets = [*STEPS, f"launch.image={kube.image}", *(f"launch.resources.{setting}" for setting in SMALL)]
    options = [word for setting in sets for word in ("--set", setting)]
    return ["sweep", "--config", "gpt_smoke", "--space", SPACE, "--search", "grid", *options, *more]


def wait_for_launch(kube: Kube, run: str) -> None:
    """The driver checks all trials before it launches the first one."""
    deadline = time.monotonic() + 120
    while kube.llmtrain("status", run, "--json", expect=None).code != 0:
        assert time.monotonic() < deadline, f"{run} was not launched"
        time.sleep(1)


def test_sweep_survives_its_driver_and_ends_as_on_this_machine(kube: Kube) -> None:
    assert "indexed_job" in registry.KINDS
    driver = kube.start(*words(kube, "--halving", "4", "--name", "tried", "--launch", "--parallel", "2"))
    wait_for_launch(kube, "tried-0")
    kube.wait("tried-0", lambda status: status["state"] in ("running", "finished"), within=180)
    driver.kill()
    driver.wait()
    done = kube.local("sweep", "--resume", "tried", "--json", "--kubeconfig", str(kube.kubeconfig), timeout=900)
    table = done.json
    assert table["is_complete"]
    assert [row["step"] for row in table["rows"]].count(12) == 1
    winner = table["winner"]["run_id"]
    kube.llmtrain("fetch", winner)
    finished = json.loads((kube.folder / "runs" / winner / "finished.json").read_text())
    assert finished["state_sha256"] == table["winner"]["state_sha256"]
    assert finished["generation"] > 1  # promoted by a resume
    # The same sweep here has the same losses: one CPU architecture, one thread.
    local = kube.local(*words(kube, "--halving", "4", "--name", "here", "--json"), timeout=900).json
    assert [row["scores"] for row in local["rows"]] == [row["scores"] for row in table["rows"]]
    assert local["winner"]["state_sha256"] == table["winner"]["state_sha256"]


def test_interrupted_driver_leaves_its_runs_on_the_cluster(kube: Kube) -> None:
    slow = ["--set", "trainer.max_steps=400", "--set", "model.d_model=128"]
    driver = kube.start(*words(kube, "--name", "left", "--launch", "--parallel", "1", *slow))
    wait_for_launch(kube, "left-0")
    kube.wait("left-0", lambda status: status["state"] == "running", within=180)
    driver.terminate()
    deadline = time.monotonic() + 60
    while driver.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert driver.returncode == ExitCode.INTERRUPTED
    assert kube.status("left-0")["state"] in ("running", "finished")
    kube.llmtrain("delete", "left-0", "--data", "--yes")
