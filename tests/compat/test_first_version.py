"""Runs that the first version recorded (tests/first_version) resume to the bits that it would have reached itself."""

import json
import platform
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_harness import start_cli

RECORDED = Path(__file__).resolve().parents[1] / "first_version"
LOG_EVERY_STEP = ["--set", "trainer.log_every_steps=1"]  # the first version logged the loss of one step
EXPECTED = json.loads((RECORDED / "expected.json").read_text())


@pytest.mark.parametrize("run", sorted(EXPECTED["runs"]))
def test_resume_of_a_first_version_run_is_bit_exact(run: str, workdir: Path) -> None:
    """In a process of its own: a thread count that was used earlier in a process stays with libraries on aarch64."""
    if run in ("lora", "packed"):
        pytest.importorskip("peft", reason="needs the hf extra")
    shutil.copytree(RECORDED, workdir, dirs_exist_ok=True)
    processes = ["--processes", "2"] if run == "ddp" else []
    done = start_cli("train", "--resume", run, *processes, *LOG_EVERY_STEP, "--json", cwd=workdir)
    assert done.wait() == 0, done.err
    expected: dict[str, Any] = EXPECTED["runs"][run]
    result = json.loads(done.out)
    assert (result["steps"], result["resumed_from"]) == (12, 7)
    if EXPECTED["made_on"] == f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}":
        assert result["state_sha256"] == expected["state_sha256"]
    for loss in ("final_train_loss", "final_val_loss"):
        assert result[loss] == pytest.approx(expected[loss], abs=2e-3)
