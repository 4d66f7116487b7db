"""Every benchmark still runs, in a form that takes seconds; the results are meaningless."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from preference_data import make_pairs
from tiny_llama import make_examples, make_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHORT: dict[str, tuple[str, ...]] = {
    "eval_tasks": ("--rounds", "1", "--items", "4"),
    "finetune_gpu": (),
    "gpt2_gpu": (),
    "generate_speed": ("--rounds", "1", "--tokens", "4", "--vocabulary", "256"),
    "gpt_cpu": ("--rounds", "1", "--steps", "12", "--shape", "tiny"),
    "install": (),
    "launch": (),
    "lora": ("--model", "{directory}/model", "--data", "{directory}/rows.jsonl", "--rows", "16", "--rounds", "1"),
    "mixture": ("--rounds", "1", "--batches", "20", "--steps", "2", "--batch", "2", "--block-size", "16"),
    "optimizer_overhead": ("--rounds", "1", "--steps", "1"),
    "plan": ("--tiny",),
    "page": ("--runs", "30", "--rows", "300", "--ranks", "16", "--seconds", "1", "--rounds", "1"),
    "preferences": (
        *("--model", "{directory}/model", "--pairs", "{directory}/pairs.jsonl"),
        *("--steps", "3", "--rounds", "1", "--block-size", "64"),
    ),
    "save_time": ("--rounds", "1", "--d-model", "64"),
    "scaling": ("--rounds", "1", "--steps", "2", "--variant", "1 process"),
    "start_many": ("--rounds", "1"),
    "startup": ("--rounds", "1"),
    "startup_gpu": ("--tiny",),
    "step_throughput": (),
    "step_profile": ("--steps", "2", "--config", "gpt_smoke"),
    "sweep": ("--one-layer", "--steps", "12", "--halving", "4:3", "--set", "model.d_model=32"),
    "time_to_loss": ("--data", "{directory}/text.txt", "--steps", "2", "--baseline-steps", "2"),
    "time_to_loss_gpu": ("--tiny", "--seeds", "1", "--baseline-seeds", "1"),
    "tokenize_speed": ("--data", "{directory}/text.txt", "--rounds", "1", "--tokenizer", "bpe"),
}
FAST = ("startup", "tokenize_speed")
SKIPPED = ("finetune_gpu", "gpt2_gpu", "install", "launch", "step_throughput")
"""Benchmarks that need a GPU, a network or a cluster print `skipped`."""


def run(name: str, directory: Path, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *(word.format(directory=directory) for word in words)]
    environment = {**os.environ, "HOME": str(directory)}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_text(directory: Path) -> None:
    lines = [f"{number} times {number} is {number * number}, as every child knows.\n" for number in range(1000)]
    (directory / "text.txt").write_text("".join(lines))


def test_every_benchmark_is_listed() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == SHORT.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in (*FAST, *SKIPPED))) for n in SHORT]
)
def test_benchmark_prints_ratio_or_skipped(name: str, tmp_path: Path) -> None:
    if name in ("lora", "gpt_cpu", "preferences"):
        pytest.importorskip("transformers", reason="needs the hf extra")
    if name == "page":
        pytest.importorskip("playwright", reason="needs playwright")
        if shutil.which("chromium") is None:
            pytest.skip("needs chromium")
    if name in ("lora", "preferences"):
        make_model(tmp_path / "model", max_position_embeddings=1024)
    if name == "lora":
        make_examples(tmp_path / "rows.jsonl", 16)
    make_pairs(tmp_path / "pairs.jsonl", 16)
    write_text(tmp_path)
    output = run(name, tmp_path, *SHORT[name])
    assert (" x " in output or "ratio" in output) != output.startswith("skipped"), output
    assert output.startswith("skipped") == (name in SKIPPED)


@pytest.mark.slow
def test_gpu_benchmark_runs_on_cpu(tmp_path: Path) -> None:
    write_text(tmp_path)
    output = run(
        "gpt2_gpu", tmp_path, "--files", "{directory}/text.txt", "--tiny", "--steps", "12", "--micro-batch-size", "2"
    )
    assert output.count("same state") == 3
    assert "DIFFERENT" not in output
