"""Training on real text with the presets reaches known losses (slow)."""

import json
import math
import os
from pathlib import Path

import pytest

from llmtrain.config.load import load_config
from llmtrain.training.run import run_training

SHARED = Path(os.environ.get("LLMTRAIN_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the data directory ../shared/data")


def train(preset, tmp_path, *overrides):
    overrides = [f"output.root_dir={tmp_path}/runs", f"data.cache_dir={tmp_path}/cache", *overrides]
    result = run_training(load_config(preset, overrides)).as_dict()
    records = [json.loads(line) for line in (Path(result["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert all(math.isfinite(loss) for loss in losses)
    return result, losses


@pytest.mark.slow
def test_gpt_stdlib_reduces_the_loss(tmp_path):
    result, losses = train("gpt_stdlib", tmp_path, "trainer.max_steps=300", "trainer.eval_every_steps=100")
    assert losses[-1] < losses[0] - 1.0
    assert result["final_val_loss"] < 2.4  # 5.5 initially; byte frequencies alone give about 3.3


@pytest.mark.slow
@pytest.mark.shared
@needs_shared
def test_shakespeare_char_reaches_the_nanogpt_loss(tmp_path):
    files = f"data.files=[{SHARED}/tinyshakespeare/input.txt]"
    result, losses = train("shakespeare_char", tmp_path, files)
    assert losses[-1] < losses[0]
    assert result["best_val_loss"] <= 1.892
    assert result["steps"] <= 2000


@pytest.mark.slow
@pytest.mark.shared
@needs_shared
def test_wikitext_with_gpt2_tokenizer_reduces_the_loss(tmp_path, monkeypatch):
    names = {"vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee"}
    names["encoder.json"] = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"
    for name, cached in names.items():
        (tmp_path / cached).write_bytes((SHARED / "gpt2-bpe" / name).read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    directory = SHARED / "wikitext-2"
    result, losses = train(
        "gpt_wikitext_local",
        tmp_path,
        f"data.files=[{directory}/train.txt]",
        f"data.val_files=[{directory}/valid.txt]",
        "model.d_model=64",
        "model.n_layers=2",
        "model.block_size=64",
        "trainer.max_steps=60",
        "trainer.warmup_steps=10",
        "trainer.lr=3e-3",
        "trainer.eval_batches=10",
    )
    assert losses[-1] < losses[0] - 1.0
    assert result["final_val_loss"] < 9.0  # ln(50257) is 10.8
