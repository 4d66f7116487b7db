"""Exported adapters and models: peft and transformers load them in a process that never imports llmtrain."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")


from fine_tune_workspace import GENERATION, TOKENS, Cli, Workspace, adapter_dirs, llmtrain_logits, read_base

pytestmark = pytest.mark.hf


LOAD_SCRIPT = """
import json, sys
import torch
from safetensors.torch import save_file
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
request = json.loads(sys.argv[1])
tokens = torch.tensor(request["tokens"])
logits = {}
with torch.no_grad():
    for name, directory in request["adapters"].items():
        base = AutoModelForCausalLM.from_pretrained(request["base"])
        model = PeftModel.from_pretrained(base, directory).eval()
        logits[name] = model(input_ids=tokens).logits.clone()
    facts = {}
    for name, directory in request["models"].items():
        model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        logits[name] = model.eval()(input_ids=tokens).logits.clone()
        tokenizer = AutoTokenizer.from_pretrained(directory)
        chat = [{"role": "user", "content": "say red"}]
        facts[name] = {
            "problems": sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"]])),
            "prompt": tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
            "ids": tokenizer("red green blue")["input_ids"],
            "eos": tokenizer.eos_token,
            "use_cache": model.config.use_cache,
            "dtype": str(model.dtype),
        }
assert "llmtrain" not in sys.modules
save_file(logits, request["to"])
print(json.dumps(facts))
"""


def load_in_another_process(
    workspace: Workspace, exported: dict[str, Path]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Logits of all adapters and exported models, computed by peft and transformers, and facts about the models."""
    to = workspace.directory / "logits.safetensors"
    adapters = {**adapter_dirs(workspace), "exported": exported["adapter"]}
    models = {"merged": exported["merged"], "full": exported["full"], "base": workspace.base}
    request = {
        "tokens": TOKENS.tolist(),
        "base": str(workspace.base),
        "to": str(to),
        "adapters": {name: str(path) for name, path in adapters.items()},
        "models": {name: str(path) for name, path in models.items()},
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD_SCRIPT, json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(to), json.loads(done.stdout)


def test_peft_and_transformers_compute_the_same_logits(workspace: Workspace, exported: dict[str, Path]) -> None:
    """One test for all, because it starts a process."""
    logits, facts = load_in_another_process(workspace, exported)
    expected = {
        "base": llmtrain_logits(workspace, model=str(workspace.base)),
        "merged": llmtrain_logits(workspace, run="lora"),
        "full": llmtrain_logits(workspace, run="full"),
        "run": llmtrain_logits(workspace, adapter=str(workspace.run("lora") / "adapter")),
        "exported": llmtrain_logits(workspace, adapter=str(exported["adapter"]), model=str(workspace.base)),
        **{
            f"step_{step}": llmtrain_logits(workspace, run="lora", checkpoint=f"step_{step}")
            for step in workspace.steps("lora")
        },
    }
    assert expected.keys() == logits.keys()
    for name, value in expected.items():
        assert (value - logits[name]).abs().max() < 1e-5, name
        assert name == "base" or (value - logits["base"]).abs().max() > 1e-2, f"{name} has no effect"
    first, last = workspace.steps("lora")
    assert (expected[f"step_{first}"] - expected[f"step_{last}"]).abs().max() > 1e-3
    for name in ("merged", "full"):
        assert (llmtrain_logits(workspace, model=str(exported[name])) - expected[name]).abs().max() < 1e-5
        assert facts[name] == facts["base"]
    assert facts["base"]["prompt"] == "<|im_start|>user\nsay red<|im_end|>\n<|im_start|>assistant\n"
    assert facts["base"]["problems"] == []


@pytest.mark.parametrize("name", ["merged", "full"])
def test_exported_model_keeps_generation_config(exported: dict[str, Path], name: str) -> None:
    """Chat models name their end-of-turn token in generation_config.json."""
    generation_config = json.loads((exported[name] / "generation_config.json").read_text())
    assert {key: generation_config.get(key) for key in GENERATION} == GENERATION


def test_exported_adapter_is_a_peft_directory(workspace: Workspace, exported: dict[str, Path]) -> None:
    names = {path.name for path in exported["adapter"].iterdir()}
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"}
    assert "model.safetensors" not in names
    run_adapter = workspace.run("lora") / "adapter" / "adapter_model.safetensors"
    assert (exported["adapter"] / "adapter_model.safetensors").read_bytes() == run_adapter.read_bytes()
    for name, library in (("adapter", "peft"), ("merged", "transformers"), ("full", "transformers")):
        head = yaml.safe_load((exported[name] / "README.md").read_text().split("---\n")[1])
        assert head["library_name"] == library
        assert "base_model" not in head


def test_export_does_not_contain_the_path_of_the_base_model(workspace: Workspace, exported: dict[str, Path]) -> None:
    files = [path for directory in exported.values() for path in directory.iterdir()]
    assert [path for path in files if str(workspace.base).encode() in path.read_bytes()] == []


def test_export_names_the_given_base_model(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    to = ("--to", workdir / "out", "--json")
    unnamed = cli("export", "--no-check", *workspace.run_options(), *to)
    assert (unnamed.code, unnamed.json["base_model"]) == (0, None)
    assert "--base-model" in unnamed.err
    shutil.rmtree(workdir / "out")
    named = cli("export", "--no-check", *workspace.run_options(), "--base-model", "somebody/tiny@v1.0", *to)
    assert (named.code, named.json["base_model"]) == (0, "somebody/tiny@v1.0"), named.err
    assert "warning" not in named.err
    assert read_base(workdir / "out") == ("somebody/tiny", "somebody/tiny", "v1.0")
    # An adapter directory keeps the name, and another one replaces it.
    for option, expected in ((), ("somebody/tiny", "v1.0")), (("--base-model", "me/other"), ("me/other", None)):
        copied = workdir / expected[0].replace("/", "-")
        source = ("--adapter", workdir / "out", "--model", workspace.base)
        assert cli("export", "--no-check", *source, *option, "--to", copied).code == 0
        assert read_base(copied) == (expected[0], *expected)
    merged = cli(
        "export",
        "--no-check",
        *workspace.run_options(),
        "--merge",
        "--base-model",
        "somebody/tiny",
        "--to",
        workdir / "m",
    )
    assert merged.code == 0, merged.err
    assert yaml.safe_load((workdir / "m" / "README.md").read_text().split("---\n")[1])["base_model"] == "somebody/tiny"


@pytest.mark.parametrize("name", ["/mnt/me/base", "a/b/c", "", "somebody/tiny@", "somebody/tiny@a b"])
def test_export_refuses_an_invalid_base_model(workspace: Workspace, cli: Cli, workdir: Path, name: str) -> None:
    done = cli(
        "export", "--no-check", *workspace.run_options(), "--base-model", name, "--to", workdir / "out", "--json"
    )
    assert (done.code, done.json["error"]) == (64, "UsageError")
    assert not (workdir / "out").exists()


def test_export_of_a_model_that_is_not_fine_tuned_has_no_base(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    plain = ("export", "--no-check", "--model", workspace.base, "--to", workdir / "out", "--json")
    refused = cli(*plain, "--base-model", "somebody/tiny")
    assert (refused.code, refused.json["error"]) == (64, "UsageError")
    done = cli(*plain)
    assert (done.code, done.json["base_model"]) == (0, None), done.err
    assert "--base-model" not in done.err


def test_export_of_an_adapter_directory(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    adapter = workspace.run("lora") / "adapter"
    done = cli("export", "--no-check", "--adapter", adapter, "--merge", "--to", workdir / "merged", "--json")
    assert done.code == 0, done.err
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(done.json["files"])
    merged, expected = llmtrain_logits(workspace, model=str(workdir / "merged")), llmtrain_logits(workspace, run="lora")
    assert (merged - expected).abs().max() < 1e-5


def test_export_of_another_checkpoint(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    first = workspace.steps("lora")[0]
    done = cli(
        "export",
        "--no-check",
        *workspace.run_options(),
        "--checkpoint",
        f"step_{first}",
        "--merge",
        "--to",
        workdir / "m",
        "--json",
    )
    assert done.json["step"] == first
    expected = llmtrain_logits(workspace, run="lora", checkpoint=f"step_{first}")
    assert (llmtrain_logits(workspace, model=str(workdir / "m")) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("merge", [("--merge",), ()], ids=["merged", "adapter"])
@pytest.mark.parametrize("exists", [True, False], ids=["empty-directory", "new-directory"])
def test_export_to_a_full_disk(
    workspace: Workspace, cli: Cli, workdir: Path, merge: tuple[str, ...], exists: bool
) -> None:
    to = workdir / "out" if exists else workdir / "new" / "out"
    if exists:
        to.mkdir()
    with max_file_size(8_000):
        done = cli("export", "--no-check", *workspace.run_options(), *merge, "--to", to)
    assert done.code == 64, done.err
    assert str(to) in done.err
    assert "Traceback" not in done.err
    assert to.exists() == exists
    assert list(workdir.rglob("*.*")) == []


@contextlib.contextmanager
def max_file_size(size: int) -> Iterator[None]:
    """Limit the size of files: a write beyond it fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
@pytest.mark.needs_root
def test_export_to_a_full_tmpfs(workspace: Workspace, workdir: Path) -> None:
    """In its own process: a library that maps a file it cannot fill is killed by a signal."""
    disk = workdir / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small tmpfs")
    try:
        command = [
            sys.executable,
            "-m",
            "llmtrain",
            "export",
            "--no-check",
            *workspace.run_options(),
            "--merge",
            "--to",
            str(disk / "out"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 65, done.stderr
        assert str(disk / "out") in done.stderr
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_export_refuses_a_non_empty_directory(workspace: Workspace, cli: Cli, workdir: Path) -> None:
    (workdir / "out").mkdir()
    (workdir / "out" / "precious").write_text("mine")
    done = cli("export", "--no-check", *workspace.run_options(), "--merge", "--to", workdir / "out")
    assert done.code == 64
    assert [path.name for path in (workdir / "out").iterdir()] == ["precious"]
