"""Tests that need a GPU. `make test-gpu` runs them; elsewhere they are skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_run import TINY, TINY_MODEL, Done, Train


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    own = [item for item in items if here in item.path.parents]
    if not own:
        return
    import torch

    count = torch.cuda.device_count()
    for item in own:
        item.add_marker(pytest.mark.gpu)
        expected = 2 if "several" in item.path.stem else 1
        if count < expected:
            item.add_marker(pytest.mark.skip(reason=f"needs {expected} CUDA devices, found {count}"))


@pytest.fixture
def train(tmp_path: Path, cache: Path) -> Train:
    """`llmtrain train` in a process of its own: train("model.d_model=64", folder="a", LLMTRAIN_FAULT="...")."""

    def run(
        *sets: str, folder: str = "runs", resume: str | None = None, processes: int | None = None, **environ: str
    ) -> Done:
        model = [] if any(text.startswith("model.name=") for text in sets) else TINY_MODEL
        overrides = [*TINY, *model, f"data.cache_dir={cache}", f"output.root_dir={tmp_path / folder}", *sets]
        arguments = ["train", *(part for text in overrides for part in ("--set", text)), "--json"]
        arguments += ["--resume", resume] if resume else []
        arguments += ["--processes", str(processes)] if processes else []
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain", *arguments],
            env={**os.environ, **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def llama(tmp_path: Path) -> list[str]:
    """Settings of a tiny Llama that is fine-tuned, without a learning rate."""
    pytest.importorskip("peft")
    from tiny_llama import make_examples, make_model

    model = make_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    rows, val = make_examples(tmp_path / "train.jsonl", 64), make_examples(tmp_path / "val.jsonl", 8, first=100)
    return [
        "model.name=hf_causal_lm",
        f"model.path={model}",
        "data.name=instruct_jsonl",
        f"data.train_file={rows}",
        f"data.val_file={val}",
        "data.tokenizer=",
        "trainer.eval_batches=",
    ]
