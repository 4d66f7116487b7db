"""Datasets by their former names (`wikitext`), against the stand-in hub: it redirects them as the real one does, and
the pinned datasets library refuses them."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest

from hub_server import FakeHub, Repo, serve
from llmtrain.hub.dataset_names import OWNERS, full_dataset_name
from llmtrain.hub.token import TOKEN_VARIABLES

CARD = b"""---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: wikitext-2-raw-v1/train-*}
  - {split: validation, path: wikitext-2-raw-v1/validation-*}
---
"""
DOCUMENT = """
schema_version: 1
model: {name: gpt, block_size: 32, d_model: 32, n_layers: 1, n_heads: 2, d_ff: 64, dropout: 0.0, vocab_size: 257}
data: {name: hf_text, dataset_name: NAME, dataset_config: wikitext-2-raw-v1, train_split: train,
  val_split: validation, text_column: text, cache_dir: cache}
trainer: {max_steps: 2, micro_batch_size: 2, grad_accum_steps: 1, lr: 0.001, warmup_steps: 0, eval_every_steps: 2,
  save_every_steps: 2, log_every_steps: 1}
"""


def parquet(text: str) -> bytes:
    file = io.BytesIO()
    datasets.Dataset.from_dict({"text": [text] * 200}).to_parquet(file)
    return file.getvalue()


def wikitext() -> Repo:
    files = {
        f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet": parquet(f"{split}\n") for split in ("train", "validation")
    }
    return Repo({"README.md": CARD, **files}, kind="dataset")


@dataclass
class Sandbox:
    hub: FakeHub
    directory: Path

    def run(self, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
        unset = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", *TOKEN_VARIABLES, "http_proxy", "HTTP_PROXY", "ALL_PROXY")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        return subprocess.run(
            [sys.executable, "-m", "llmtrain", *words],
            env={**kept, **self.hub.environment(self.directory / "hf-home"), **env},
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
        )

    def train(self, name: str, **env: str) -> "subprocess.CompletedProcess[str]":
        """A config as document 3 writes it. The tokenizer that it means, gpt2, has its files elsewhere."""
        (self.directory / "train.yaml").write_text(DOCUMENT.replace("NAME", name))
        return self.run("train", "--config", "train.yaml", "--set", "data.tokenizer=byte", "--json", **env)


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with serve() as hub:
        yield Sandbox(hub, tmp_path)


@pytest.mark.slow
def test_wikitext_trains(sandbox: Sandbox) -> None:
    sandbox.hub.repos["Salesforce/wikitext"] = wikitext()
    done = sandbox.train("wikitext")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    assert "Salesforce/wikitext" in done.stderr
    assert not any("/datasets/wikitext" in request.path for request in sandbox.hub.requests)


@pytest.mark.slow
def test_preset_gpt_wikitext_trains(sandbox: Sandbox) -> None:
    sandbox.hub.repos["Salesforce/wikitext"] = wikitext()
    small = ("data.tokenizer=byte", "data.cache_dir=cache", "model.block_size=32", "model.d_model=32")
    small = (*small, "model.n_layers=1", "model.n_heads=2", "trainer.max_steps=2", "trainer.warmup_steps=0")
    done = sandbox.run(
        "train", "--config", "gpt_wikitext", *(word for text in small for word in ("--set", text)), "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"


@pytest.mark.slow
def test_redirect_is_followed_and_cached(sandbox: Sandbox) -> None:
    sandbox.hub.repos["somebody/old_text"] = wikitext()
    sandbox.hub.moved["old_text"] = "somebody/old_text"
    (sandbox.directory / "train.yaml").write_text(DOCUMENT.replace("NAME", "old_text"))
    fetched = sandbox.run("prefetch", "--config", "train.yaml", "--set", "data.tokenizer=byte", "--json")
    assert fetched.returncode == 0, fetched.stderr
    assert "somebody/old_text" in fetched.stderr
    sandbox.hub.requests.clear()
    done = sandbox.train("old_text", HF_HUB_OFFLINE="1")  # as the trainer of a pod, after its init container
    assert done.returncode == 0, done.stderr
    assert sandbox.hub.requests == []


def test_unknown_name(sandbox: Sandbox) -> None:
    done = sandbox.train("nosuchtext")
    assert done.returncode == 64
    assert "nosuchtext" in json.loads(done.stdout)["what"]
    assert not (sandbox.directory / "runs").exists() or not list(sandbox.directory.glob("runs/*/checkpoints/step_*"))


def test_fetch_data_follows_the_redirect(sandbox: Sandbox) -> None:
    sandbox.hub.repos["Salesforce/wikitext"] = wikitext()
    sandbox.hub.moved["wikitext"] = "Salesforce/wikitext"
    done = sandbox.run("fetch-data", "wikitext", "--to", "here", "--json")
    assert done.returncode == 0, done.stderr
    assert (sandbox.directory / "here/wikitext-2-raw-v1/train-00000-of-00001.parquet").is_file()


@pytest.mark.slow
def test_directory_takes_precedence(sandbox: Sandbox) -> None:
    directory = sandbox.directory / "wikitext" / "wikitext-2-raw-v1"
    directory.mkdir(parents=True)
    for name, data in wikitext().files.items():
        (sandbox.directory / "wikitext" / name).write_bytes(data)
    done = sandbox.train("wikitext")
    assert done.returncode == 0, done.stderr
    assert sandbox.hub.requests == []


def test_known_names_need_no_hub(tmp_path: Path) -> None:
    names = {name: full_dataset_name(name, tmp_path) for name in OWNERS}
    assert names["wikitext"] == "Salesforce/wikitext"
    assert all(full.count("/") == 1 and full.endswith(f"/{name}") for name, full in names.items())
    assert full_dataset_name("somebody/wikitext", tmp_path) == "somebody/wikitext"
    assert list(tmp_path.iterdir()) == []
