"""A directory with a tiny model, examples, a LoRA run and a full fine-tuning run."""

import contextlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

TOKENS = torch.arange(5, 65).view(2, 30)
GENERATION = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 0]}
Cli = Callable[..., Any]


@dataclass(frozen=True)
class Workspace:
    """A directory with a base model, examples and runs."""

    directory: Path
    results: dict[str, dict[str, Any]]

    @property
    def base(self) -> Path:
        return self.directory / "base"

    @property
    def root(self) -> Path:
        return self.directory / "runs"

    @property
    def val(self) -> Path:
        return self.directory / "val.jsonl"

    def run(self, run_id: str) -> Path:
        return self.root / run_id

    def run_options(self, run_id: str = "lora") -> list[str]:
        return ["--run", run_id, "--root", str(self.root)]

    def steps(self, run_id: str) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.run(run_id) / "checkpoints").glob("step_*"))

    def train(self, *overrides: str, more: tuple[str, ...] = ()) -> list[str]:
        sets = [part for text in overrides for part in ("--set", text)]
        return ["train", "--config", str(self.directory / "config.yaml"), "--json", *sets, *more]


def write_config(directory: Path) -> None:
    document = {
        "schema_version": 3,
        "run": {"name": "tiny", "device": "cpu", "threads": 1},
        "model": {"name": "hf_causal_lm", "path": str(directory / "base"), "lora": {"rank": 4, "alpha": 8.0}},
        "data": {
            "name": "instruct_jsonl",
            "train_file": str(directory / "train.jsonl"),
            "val_file": str(directory / "val.jsonl"),
            "cache_dir": str(directory / "cache"),
        },
        "trainer": {
            "max_epochs": 2,
            "micro_batch_size": 2,
            "lr": 2e-2,
            "schedule": "constant",
            "eval_prompts": ["say red", "say blue"],
            "eval_prompt_tokens": 6,
            "log_every_steps": 1,
        },
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(document))


def train_in(directory: Path, arguments: list[str]) -> dict[str, Any]:
    """`llmtrain train --json` in this process, with `directory` as working directory."""
    from llmtrain.cli import main

    previous, out = Path.cwd(), io.StringIO()
    os.chdir(directory)
    try:
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
            main(arguments)
    finally:
        os.chdir(previous)
    assert ended.value.code == 0, out.getvalue()
    return dict(json.loads(out.getvalue()))


def llmtrain_logits(workspace: Workspace, **source: str) -> torch.Tensor:
    from llmtrain.inference.load import Source, load_model

    loaded = load_model(Source(root=str(workspace.root), **source), "cpu")
    with torch.no_grad():
        logits: torch.Tensor = loaded.module(TOKENS)
    return logits


def adapter_dirs(workspace: Workspace) -> dict[str, Path]:
    run = workspace.run("lora")
    return {
        "run": run / "adapter",
        **{f"step_{step}": run / "checkpoints" / f"step_{step}" / "adapter" for step in workspace.steps("lora")},
    }


def read_base(directory: Path) -> tuple[object, object, object]:
    """The base model in a card, and its name and revision in adapter_config.json."""
    head = yaml.safe_load((directory / "README.md").read_text().split("---\n")[1])
    values = json.loads((directory / "adapter_config.json").read_text())
    return head.get("base_model"), values["base_model_name_or_path"], values["revision"]


def sources(workspace: Workspace, exported: dict[str, Path]) -> dict[str, list[str]]:
    return {
        "run": workspace.run_options(),
        "adapter": ["--adapter", str(workspace.run("lora") / "adapter")],
        "exported-adapter": ["--adapter", str(exported["adapter"]), "--model", str(workspace.base)],
        "merged": ["--model", str(exported["merged"])],
    }


def assert_refused(done: Any, code: int, message: str, workdir: Path) -> None:
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert "\nerror: " in f"\n{done.err}"
    assert done.json["exit_code"] == code
    assert not (workdir / "runs").exists()


ONE_STEP = ["trainer.max_epochs=null", "trainer.max_steps=1"]
