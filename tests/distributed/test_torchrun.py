"""Real torchrun around `llmtrain train`. Each launch imports torch in every process: slow."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmtrain.runs.metrics import read_metrics

pytestmark = pytest.mark.slow


def torchrun(directory: Path, *words: str, count: int = 2, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"),
            *("-m", "llmtrain", "train", *words),
        ],
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "HOME": str(directory), "CUDA_VISIBLE_DEVICES": "", **env},
    )


def test_ddp_two_process_torchrun(tmp_path: Path, repo: Path) -> None:
    """Train, resume with more steps, and compare with one process: only rank 0 writes and prints."""
    preset = str(repo / "configs/presets/ddp_smoke.yaml")
    common = ["--set", "output.root_dir=runs", "--set", "output.run_id=two", "--set", "trainer.schedule_steps=30"]
    first = torchrun(tmp_path, "--config", preset, *common, "--set", "trainer.max_steps=20", "--json")
    assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout)
    assert (result["world_size"], result["steps"], result["strategy"]) == (2, 20, "ddp")
    run = tmp_path / "runs" / "two"
    made = sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
    assert {"config.yaml", "meta.json", "metrics.jsonl", "checkpoints", "finished.json"} <= set(made)
    assert len(list((tmp_path / "runs").iterdir())) == 1, "one run, not one per rank"
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row]
    assert steps == [5, 10, 15, 20], "each step once"
    assert first.stderr.count("[DONE]") == 1
    assert first.stderr.count("[DDP] 2 processes, backend gloo") == 1
    assert sorted(path.name for path in (run / "checkpoints" / "step_20").glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    meta = (run / "meta.json").read_bytes()

    second = torchrun(tmp_path, "--config", preset, *common, "--resume", "two", "--json")
    assert second.returncode == 0, second.stderr
    resumed = json.loads(second.stdout)
    assert (resumed["resumed_from"], resumed["steps"]) == (20, 30)
    assert (run / "meta.json").read_bytes() == meta
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl") if "train/loss" in row]
    assert steps == [5, 10, 15, 20, 25, 30]

    alone = subprocess.run(
        [
            *(sys.executable, "-m", "llmtrain", "train", "--config", preset, "--json"),
            *("--set", "output.root_dir=runs", "--set", "output.run_id=one", "--set", "trainer.schedule_steps=30"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout)["state_sha256"] == resumed["state_sha256"], "ddp_smoke is exact on 1 and 2"


def test_torchrun_restart_resumes_from_checkpoint(tmp_path: Path, repo: Path) -> None:
    preset = str(repo / "configs/presets/ddp_smoke.yaml")
    sets = ["--set", "output.root_dir=runs", "--set", "output.run_id=two"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"),
            *("-m", "llmtrain", "train", "--config", preset, *sets, "--json"),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
            "LLMTRAIN_FAULT": "after_optimizer:15:1:kill:0",
        },
    )
    assert done.returncode == 0, done.stderr
    *failed, result = objects(done.stdout)
    assert {row["error"] for row in failed} <= {"PeerLost"}
    assert (result["resumed_from"], result["generation"], result["steps"]) == (10, 2, 30)


def objects(text: str) -> list[dict[str, Any]]:
    """All JSON objects of a text that holds nothing else."""
    found, rest = [], text.strip()
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


@pytest.fixture(scope="module")
def bad_config(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    directory = tmp_path_factory.mktemp("mistake")
    return directory, torchrun(directory, "--config", "gpt_smoke", "--set", "trainer.grad_accum_steps=1", "--json")


def test_config_error_under_torchrun_is_reported(bad_config: Any) -> None:
    directory, done = bad_config
    assert done.returncode != 0
    assert "trainer.grad_accum_steps" in done.stderr
    assert all(row["exit_code"] == 64 for row in objects(done.stdout))
    assert not (directory / "runs").exists()


def test_config_error_under_torchrun_prints_one_object(bad_config: Any) -> None:
    assert len(objects(bad_config[1].stdout)) == 1


def test_dry_run_under_torchrun_prints_one_object_for_all_processes(tmp_path: Path) -> None:
    """commands/test_train.py has the same without a launcher."""
    sets = ["--set", "trainer.scale_batch=true", "--set", "trainer.grad_accum_steps=2"]
    reports = []
    for count in (1, 2):
        done = torchrun(tmp_path, "--config", "ddp_smoke", *sets, "--dry-run", "--json", count=count)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    assert [report["world_size"] for report in reports] == [1, 2]
    assert reports[1]["tokens_per_step"] == 2 * reports[0]["tokens_per_step"]
