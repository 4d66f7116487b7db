"""Model directories, configs and examples that cannot be used."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")


from fine_tune_workspace import Cli, Workspace, assert_refused

from llmtrain.core.install import install_command
from tiny_llama import make_model

pytestmark = pytest.mark.hf


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def pickle_only(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def unknown_architecture(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "frobnicator", "vocab_size": 300}))


def corrupt_config(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def not_a_language_model(directory: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=32).save_pretrained(directory)


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt_weights(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0nonsense nonsense")


def remove_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name},
        directory / "model.safetensors",
        {"format": "pt"},
    )


def with_config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def fewer_tokens(directory: Path) -> None:
    make_model(directory, vocab_size=280)


def corrupt_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")


MODELS: dict[str, tuple[Callable[[Path], Any], int, str]] = {
    "missing directory": (shutil.rmtree, 64, "model.path"),
    "no config.json": (without("config.json"), 65, "config.json"),
    "no weights": (without("model.safetensors"), 65, "model.safetensors"),
    "only a pickle": (pickle_only, 65, "pytorch_model.bin"),
    "unknown architecture": (unknown_architecture, 65, "frobnicator"),
    "corrupt config.json": (corrupt_config, 65, "config.json"),
    "not a language model": (not_a_language_model, 65, "model"),
    "truncated weights": (truncate_weights, 65, "SafetensorError"),
    "corrupt weights": (corrupt_weights, 65, "SafetensorError"),
    "missing tensor": (remove_tensor, 65, "model.layers.1.mlp.up_proj.weight"),
    "fewer layers than the files": (with_config(num_hidden_layers=1), 65, "model.layers.1.mlp.down_proj.weight"),
    "no layers": (with_config(num_hidden_layers=-1), 65, "num_hidden_layers"),
    "a billion layers": (with_config(num_hidden_layers=10**9), 65, "num_hidden_layers"),
    "another width": (
        with_config(intermediate_size=64),
        65,
        "mlp.down_proj.weight is 32 x 48, config.json says 32 x 64",
    ),
    "a billion columns": (with_config(intermediate_size=10**9), 65, "config.json says 32 x 1000000000"),
    "fewer tokens than the tokenizer": (fewer_tokens, 65, "280"),
    "no tokenizer": (without("tokenizer.json"), 65, "model.tokenizer_path"),
    "corrupt tokenizer": (corrupt_tokenizer, 65, "tokenizer"),
}


@pytest.mark.parametrize("case", MODELS)
def test_bad_model_directory_is_refused(workspace: Workspace, cli: Cli, workdir: Path, case: str) -> None:
    damage, code, message = MODELS[case]
    shutil.copytree(workspace.base, workdir / "model")
    damage(workdir / "model")
    done = cli(*workspace.train(f"model.path={workdir / 'model'}"))
    assert_refused(done, code, message, workdir)
    assert str(workdir / "model") in done.err or case == "fewer tokens than the tokenizer"


CONFIGS: dict[str, tuple[list[str], int, str]] = {
    "block_size beyond the positions": (["model.block_size=129"], 64, "model.block_size must be at most 128"),
    "remote code without a commit": (
        ["model.path=somebody/model", "model.trust_remote_code=true"],
        64,
        "model.revision",
    ),
    "4 bits without a GPU": (["model.lora.quantize=true"], 64, "model.lora.quantize"),
    "no path": (["model.path=null"], 64, "model.path"),
    "empty path": (["model.path="], 64, "model.path"),
    "lora of a gpt": (["model.name=gpt", "model.lora.rank=4"], 64, "model.lora"),
    "packing of a gpt": (
        ["model.name=gpt", "data.tokenizer={base}"],
        64,
        "data.packing",
    ),
    "unknown layer": (["model.lora.target_modules=[q_proj, nonsense]"], 64, "nonsense"),
    "name that is not in the cache": (["model.path=somebody/model"], 64, "somebody/model"),
    "warm-up longer than the run": (["trainer.warmup_steps=1000", "trainer.schedule=cosine"], 64, "warmup_steps 1000"),
    "missing file": (["data.train_file=nowhere.jsonl"], 65, "nowhere.jsonl"),
    "examples too long to be used": (["model.block_size=8"], 65, "model.block_size 8"),
    "examples too long, as an error": (["model.block_size=30", "data.truncation=error"], 65, "line"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_config_is_refused(workspace: Workspace, cli: Cli, workdir: Path, case: str) -> None:
    overrides, code, message = CONFIGS[case]
    done = cli(*workspace.train(*(text.replace("{base}", str(workspace.base)) for text in overrides)))
    assert_refused(done, code, message, workdir)


GOOD = json.dumps({"instruction": "say red", "output": "red"})
BAD_FILES: dict[str, tuple[str, str]] = {
    "no answer": (f'{GOOD}\n{GOOD}\n{{"instruction": "say red"}}\n', "line 3: "),
    "empty answer": (f'{GOOD}\n{{"instruction": "say red", "output": ""}}\n', "line 2: "),
    "invalid JSON": (f'{GOOD}\n{GOOD}\n{GOOD}\n{{"instruction": \n', "line 4: "),
    "not an object": (f"{GOOD}\n[1, 2]\n", "line 2: "),
    "empty": ("", "is empty"),
    "blank lines": ("\n\n", "is empty"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_examples_are_refused(workspace: Workspace, cli: Cli, workdir: Path, case: str) -> None:
    text, message = BAD_FILES[case]
    (workdir / "examples.jsonl").write_text(text)
    done = cli(*workspace.train("data.train_file=examples.jsonl"))
    assert_refused(done, 65, message, workdir)
    assert "examples.jsonl" in done.err


@pytest.mark.parametrize("missing", ["peft", "transformers"])
def test_missing_hf_extra_is_refused(
    workspace: Workspace, cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == missing else find(name, *more))
    done = cli(*workspace.train())
    assert_refused(done, 64, missing, workdir)
    assert install_command("hf") in done.err
