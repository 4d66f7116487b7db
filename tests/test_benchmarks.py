"""Every benchmark runs, in a form that takes seconds: what it measures then means nothing, but it has not rotted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_llama import make_examples, make_model

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SHORT: dict[str, tuple[str, ...]] = {
    "gpt2_gpu": (),
    "gpt_cpu": ("--rounds", "1", "--steps", "12", "--shape", "tiny"),
    "launch": (),
    "lora": ("--model", "{folder}/model", "--data", "{folder}/rows.jsonl", "--rows", "16", "--rounds", "1"),
    "save_time": ("--rounds", "1", "--d-model", "64"),
    "scaling": ("--rounds", "1", "--steps", "2", "--variant", "1 process"),
    "start_many": ("--rounds", "1"),
    "startup": ("--rounds", "1"),
    "step_profile": ("--steps", "2", "--config", "gpt_smoke"),
    "time_to_loss": ("--data", "{folder}/text.txt", "--steps", "2"),
    "tokenize_speed": ("--data", "{folder}/text.txt", "--rounds", "1", "--tokenizer", "bpe"),
}
ELSEWHERE = ("gpt2_gpu", "launch")
"""Need a GPU or a cluster: here they only say so."""


def run(name: str, folder: Path, *words: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *(word.format(folder=folder) for word in words)]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_text(folder: Path) -> None:
    lines = [f"{number} times {number} is {number * number}, as every child knows.\n" for number in range(1000)]
    (folder / "text.txt").write_text("".join(lines))


def test_none_is_left_out() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == SHORT.keys()


@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    if name in ("lora", "gpt_cpu"):
        pytest.importorskip("transformers", reason="needs the hf extra")
    if name == "lora":
        make_model(tmp_path / "model", max_position_embeddings=1024)
        make_examples(tmp_path / "rows.jsonl", 16)
    write_text(tmp_path)
    said = run(name, tmp_path, *SHORT[name])
    assert (" x " in said or "ratio" in said) != said.startswith("skipped"), said
    assert said.startswith("skipped") == (name in ELSEWHERE)


@pytest.mark.slow
def test_the_benchmark_for_gpus_on_a_cpu(tmp_path: Path) -> None:
    write_text(tmp_path)
    said = run(
        "gpt2_gpu", tmp_path, "--files", "{folder}/text.txt", "--tiny", "--steps", "12", "--micro-batch-size", "2"
    )
    assert said.count("same state") == 3
    assert "DIFFERENT" not in said
