"""Exported directories: loaded by transformers without network, modes of files, data types, the hub."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from llmtrain.config.load import load_config
from llmtrain.training.run import run_training
from slow_cases import some
from tiny_llama import make_examples, make_model

Cli = Callable[..., Any]

TEXT = "the pod waits for the master, the node resumes. Été 😀\n" * 60
PROMPT = "the pod "


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> Path:
    """Runs of a small GPT, named after their tokenizer (byte, char, and one trained for it) or their export format."""
    from llmtrain.data.tokenizers.bpe import train_bpe

    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    train_bpe([TEXT], 300, folder / "bpe")
    modern = "model.architecture=modern"
    for run_id, tokenizer, *changes in (
        ("byte", "byte"),
        ("char", "char"),
        ("trained", str(folder / "bpe")),
        ("qwen3", "byte", modern, "model.mlp=swiglu", "model.n_kv_heads=1"),
        ("nanochat", "byte", modern, "model.mlp=relu2"),
    ):
        sets = [*tiny, "model.name=gpt", "model.n_layers=1", "model.n_heads=2", f"output.root_dir={folder}"]
        sets += ["data.name=text_files", f"data.files=[{folder / 'text.txt'}]", f"data.tokenizer={tokenizer}"]
        run_training(load_config("gpt_smoke", [*sets, *changes, f"output.run_id={run_id}"]))
    return folder


@pytest.mark.hf
@pytest.mark.parametrize("run_id", some(["byte", "char", "trained", "qwen3", "nanochat"], "byte", "char", "trained"))
def test_pipeline_continues_text_as_generate_does(root: Path, cli: Cli, workdir: Path, run_id: str) -> None:
    from transformers import pipeline

    is_checked = run_id not in ("char", "trained")  # one new process per format
    options = [] if is_checked else ["--no-check"]
    done = cli("export", "--run", run_id, "--root", root, "--to", "exported", *options, "--json")
    assert done.code == 0, done.err
    assert (done.json["check"] is not None) == ("export-check.json" in done.json["files"]) == is_checked
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(done.json["files"])
    ours = cli(
        *("generate", "--run", run_id, "--root", root, "--prompt", PROMPT, "--temperature", 0),
        *("--max-new-tokens", 6, "--json"),
    ).json["text"]
    generate = pipeline("text-generation", str(workdir / "exported"), device="cpu")
    assert generate.model.config.model_type == (run_id if run_id in ("qwen3", "nanochat") else "gpt2")
    theirs = generate(PROMPT, max_new_tokens=6, do_sample=False)[0]["generated_text"]
    assert theirs == PROMPT + ours
    assert generate.model.generation_config.eos_token_id == generate.tokenizer.eos_token_id
    if run_id != "char":  # char has no token to begin a document with
        assert generate("", max_new_tokens=2)


@pytest.mark.hf
def test_exported_run_can_be_used_as_model_directory(root: Path, cli: Cli) -> None:
    assert cli("export", "--no-check", "--run", "byte", "--root", root, "--to", "exported").code == 0
    common = ["generate", "--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 6, "--json"]
    run = cli(*common, "--run", "byte", "--root", root).json["text"]
    assert cli(*common, "--model", "exported", "--raw").json["text"] == run


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.hf
@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_every_file_follows_the_umask(cli: Cli, cache: Path, workdir: Path, umask: Any, mask: int) -> None:
    """Of a LoRA run with its checkpoints and adapters, and of its exports."""
    umask(mask)
    make_examples(workdir / "train.jsonl", 12)
    base = make_model(workdir / "base")
    sets = [f"model.path={base}", "model.block_size=64", "model.lora.rank=4", f"data.cache_dir={cache}"]
    sets += ["data.train_file=train.jsonl", "data.val_file=train.jsonl", "trainer.eval_prompts=[]"]
    sets += ["trainer.max_steps=1", "trainer.warmup_steps=0", "run.device=cpu", "run.threads=1", "output.run_id=mine"]
    done = cli("train", "-c", "lora_instruct", *(part for text in sets for part in ("--set", text)))
    assert done.code == 0, done.err
    assert cli("export", "--no-check", "--run", "mine", "--to", "adapter").code == 0
    assert cli("export", "--no-check", "--run", "mine", "--merge", "--to", "merged").code == 0
    files = [path for name in ("runs", "adapter", "merged") for path in (workdir / name).rglob("*") if path.is_file()]
    assert sum(path.suffix == ".safetensors" for path in files) >= 5
    modes = {str(path): oct(path.stat().st_mode & 0o777) for path in files}
    assert {path: mode for path, mode in modes.items() if mode != oct(0o666 & ~mask)} == {}


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_export_of_a_gpt_follows_the_umask(root: Path, cli: Cli, workdir: Path, umask: Any, mask: int) -> None:
    umask(mask)
    assert cli("export", "--no-check", "--run", "byte", "--root", root, "--to", "exported").code == 0
    assert {path.stat().st_mode & 0o777 for path in (workdir / "exported").iterdir()} == {0o666 & ~mask}


def stored_dtypes(directory: Path) -> set[str]:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118 (not a dictionary)


@pytest.mark.hf
def test_base_dtype_is_the_default(cli: Cli, workdir: Path, root: Path) -> None:
    base = make_model(workdir / "base")
    for name in (torch.bfloat16, torch.float16):
        from transformers import AutoModelForCausalLM

        AutoModelForCausalLM.from_pretrained(base, dtype=name).save_pretrained(base)
        short = str(name).removeprefix("torch.")
        assert cli("export", "--no-check", "--model", base, "--to", short).code == 0
        assert stored_dtypes(workdir / short) == {str(name)}
    assert cli("export", "--no-check", "--model", base, "--dtype", "float32", "--to", "wide").code == 0
    assert stored_dtypes(workdir / "wide") == {"torch.float32"}
    assert cli("export", "--no-check", "--run", "byte", "--root", root, "--to", "gpt").code == 0
    assert stored_dtypes(workdir / "gpt") == {"torch.float32"}
    assert cli("export", "--no-check", "--model", base, "--dtype", "int8", "--to", "no").code == 64


def test_model_card_describes_the_gpt(root: Path, cli: Cli, workdir: Path) -> None:
    assert cli("export", "--no-check", "--run", "char", "--root", root, "--to", "exported").code == 0
    card = (workdir / "exported" / "README.md").read_text()
    for line in ("d_model: 16", "n_layers: 1", "n_heads: 2", "block_size: 16", "tokenizer: char", "| steps | 4 |"):
        assert line in card, line
    for word in ("lora", "packing", "prompt_format"):
        assert word not in card


def test_push_needs_a_token_and_a_destination(root: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    of_run = ["export", "--no-check", "--run", "byte", "--root", root, "--json"]
    assert cli(*of_run).code == 64
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for name in ("me/mine", "not a name"):
        done = cli(*of_run, "--push-to-hub", name)
        assert (done.code, done.json["error"]) == (64, "UsageError")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_CanaryExport5d2")
    done = cli(*of_run, "--push-to-hub", "me/mine")
    assert done.code == 64
    assert "CanaryExport" not in done.out + done.err


def test_push_uploads_what_export_writes(root: Path, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload itself: tests/hub/test_hub_upload.py."""
    from llmtrain.hub import upload

    uploaded: dict[str, Any] = {}

    def record(directory: Path, name: str, private: bool, message: str) -> str:  # noqa: ARG001
        uploaded.update(name=name, private=private, files=sorted(path.name for path in directory.iterdir()))
        return f"https://hub/{name}"

    monkeypatch.setattr(upload, "check_upload", lambda name: None)  # noqa: ARG005
    monkeypatch.setattr(upload, "upload_model", record)
    done = cli("export", "--no-check", "--run", "byte", "--root", root, "--push-to-hub", "me/mine", "--json")
    assert done.code == 0, done.err
    assert uploaded == {"name": "me/mine", "private": True, "files": done.json["files"]}
    assert (done.json["pushed_to"], done.json["to"]) == ("https://hub/me/mine", None)
    assert list(workdir.iterdir()) == []
    both = cli(
        "export",
        "--no-check",
        "--run",
        "byte",
        "--root",
        root,
        "--push-to-hub",
        "me/x",
        "--public",
        "--to",
        "here",
        "--json",
    )
    assert (uploaded["name"], uploaded["private"]) == ("me/x", False)
    assert {path.name for path in (workdir / "here").iterdir()} == set(both.json["files"])


def test_config_has_the_end_of_text(root: Path, cli: Cli, workdir: Path) -> None:
    for run_id, expected in (("byte", 0), ("char", None), ("trained", 0)):
        assert cli("export", "--no-check", "--run", run_id, "--root", root, "--to", run_id).code == 0
        for name in ("config.json", "generation_config.json"):
            values = json.loads((workdir / run_id / name).read_text())
            assert (values["eos_token_id"], values["bos_token_id"]) == (expected, expected)


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("I/O error: No space left on device (os error 28)"),  # as safetensors writes it
    ],
)
def test_full_disk_leaves_nothing_behind(
    root: Path, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def write_half(path: Path, *_: object, **__: object) -> None:
        path.with_name("half").write_text("x")
        raise problem

    monkeypatch.setattr("llmtrain.inference.export.write_atomic", write_half)
    done = cli("export", "--no-check", "--run", "byte", "--root", root, "--to", "exported", "--json")
    assert (done.code, done.json["reason"]) == (65, "disk_full"), done.err
    assert done.json["remedy"]
    assert list(workdir.iterdir()) == []
