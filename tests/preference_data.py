"""Preference pairs for a tiny model, and its config."""

import json
from pathlib import Path
from typing import Any

from llmtrain.config.document import Document
from llmtrain.config.load import build_config
from llmtrain.config.schema import Config
from tiny_llama import WORDS


def pair(number: int) -> dict[str, str]:
    """A pair whose answers have different lengths."""
    words = [WORDS[(number * 7 + i) % len(WORDS)] for i in range(1 + number % 5)]
    rejected = [*words[: 1 + number % 3], WORDS[(number + 3) % len(WORDS)]]
    return {
        "prompt": f"say {' '.join(words)}",
        "chosen": " ".join([*reversed(words), WORDS[number % len(WORDS)]]),
        "rejected": " ".join(rejected),
    }


def make_pairs(path: Path, count: int, first: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(pair(number)) + "\n" for number in range(first, first + count)))
    return path


def preference_config(folder: Path, model: dict[str, Any], **changes: Any) -> Config:
    """A run of two epochs on `train.jsonl` and `val.jsonl` of a folder; changes are `section__field=value`."""
    values: dict[str, dict[str, Any]] = {
        "run": {"name": "pairs", "seed": 7, "device": "cpu", "threads": 1},
        "model": model,
        "data": {
            "name": "preference_jsonl",
            "train_file": str(folder / "train.jsonl"),
            "val_file": str(folder / "val.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        "trainer": {
            "max_epochs": 2,
            "micro_batch_size": 1,
            "grad_accum_steps": 4,
            "lr": 1e-2,
            "log_every_steps": 1,
            "objective": {"name": "dpo"},
        },
        "output": {"root_dir": str(folder / "runs")},
    }
    overrides = [f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in changes.items()]
    return build_config(Document("test", {"schema_version": 3, **values}), overrides)
