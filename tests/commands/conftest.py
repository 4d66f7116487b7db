"""Runs that are trained once, and a typical call of every command."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.config.load import load_config


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """A directory of runs: `one`, its twin, and `other` with another seed, all of a small real GPT."""
    from llmtrain.training.run import run_training

    folder = tmp_path_factory.mktemp("runs")
    sets = [*tiny, "model.name=gpt", "model.n_layers=1", "model.n_heads=2", f"output.root_dir={folder}"]
    for run_id, seed in (("one", 1), ("twin", 1), ("other", 2)):
        run_training(load_config("gpt_smoke", [*sets, f"run.seed={seed}", f"output.run_id={run_id}"]))
    return folder


@pytest.fixture
def text(workdir: Path) -> Path:
    path = workdir / "text.txt"
    path.write_text("the pod waits for the master.\n" * 40)
    return path


@pytest.fixture
def verb(root: Path, text: Path, workdir: Path, tiny: list[str]) -> Callable[[str], list[str]]:
    """The arguments of a typical call of a command."""
    sets = ["--config", "gpt_smoke", *(part for field in tiny for part in ("--set", field))]
    of_run = ["--run", "one", "--root", str(root)]
    calls = {
        "train": ["train", *sets],
        "train --dry-run": ["train", "--dry-run", *sets],
        "node": ["node", *sets],
        "node --smoke": ["node", "--smoke", "--set", "run.device=cpu"],
        "launch --dry-run": ["launch", "--dry-run", *sets, "--name", "demo", "--image", "me/train:1"],
        "doctor": ["doctor", *sets],
        "smoke": ["smoke", "--set", "run.device=cpu", "--samples", "512", "--batch", "64"],
        "validate": ["validate", "--config", "gpt_smoke"],
        "plan": ["plan", "--config", "gpt_smoke", "--set", "run.device=cpu"],
        "print-config": ["print-config", "--config", "gpt_smoke"],
        "print-config --reference": ["print-config", "--reference"],
        "config-schema": ["config-schema"],
        "presets": ["presets"],
        "presets show": ["presets", "show", "gpt_smoke"],
        "init": ["init", "--text", str(text), "--to", "made.yaml"],
        "generate": ["generate", *of_run, "--prompt", "the ", "--max-new-tokens", "20"],
        "eval": ["eval", *of_run, "--file", str(text)],
        "export": ["export", "--no-check", *of_run, "--to", str(workdir / "exported")],
        "runs list": ["runs", "list", "--root", str(root)],
        "runs show": ["runs", "show", "one", "--root", str(root)],
        "runs compare": ["runs", "compare", "one", "other", "--root", str(root)],
        "runs prune": ["runs", "prune", "one", "--root", str(root)],
        "sweep --dry-run": [
            *("sweep", "--dry-run", "--config", "gpt_smoke", "--set", "run.device=cpu"),
            *("--space", "trainer.lr=[0.01,0.02]", "--search", "grid"),
        ],
        "report": ["report", "one", "--root", str(root)],
        "tokenizer train": [
            "tokenizer",
            "train",
            "--file",
            str(text),
            "--to",
            str(workdir / "tok"),
            "--vocab-size",
            "300",
        ],
    }
    return lambda name: calls[name]
