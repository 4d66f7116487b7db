"""Every preset is valid, and the small ones train."""

import math
from pathlib import Path

import pytest

from llmtrain.config.load import list_presets, load_config
from llmtrain.registry import KINDS

NAMES = {
    "example",
    "gpt_smoke",
    "gpt_stdlib",
    "gpt_wikitext",
    "gpt_wikitext_local",
    "shakespeare_char",
    "gpt2_124m",
    "gpt_modern_124m",
    "gpt_modern_350m",
    "mlflow",
    "ddp_smoke",
    "ddp_mlflow",
    "fsdp_smoke",
    "lora_instruct",
    "full_finetune_small",
    "continue_pretrain",
    "lora_llama_1b",
    "mixture_text",
    "mixture_instruct",
    "k8s_gpu_4x1",
    "k8s_gpu_64x8",
    *(f"k8s_{kind}" for kind in KINDS),
}


def test_presets_are_complete() -> None:
    assert set(list_presets()) >= NAMES


@pytest.mark.parametrize("name", sorted(list_presets()))
def test_preset_is_valid(cli, name: str) -> None:
    done = cli("validate", "--config", name, "--json")
    assert done.code == 0, done.err
    assert done.json["schema_version"] == 3


@pytest.mark.parametrize("name", sorted(list_presets()))
def test_preset_begins_with_a_description(name: str) -> None:
    first = list_presets()[name].read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20


def test_run_names_are_unique() -> None:
    names = [load_config(name).run.name for name in list_presets()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["gpt_smoke", "example", "mlflow", "ddp_smoke", "fsdp_smoke"])
def test_small_preset_trains(cli, workdir: Path, cache: Path, name: str) -> None:
    sets = ["--set", f"data.cache_dir={cache}", "--set", "run.device=cpu", "--set", "run.threads=1"]
    done = cli("train", "--config", name, *sets, "--json")
    assert done.code == 0, done.err
    result = done.json
    assert result["final_train_loss"] < result["first_train_loss"] - 0.5
    assert result["final_val_loss"] < result["first_train_loss"] - 0.5
    assert all(math.isfinite(value) for key, value in result.items() if key.endswith("_loss"))
    assert result["sample"]
    assert "warning" not in done.err
    if name == "mlflow":
        assert (workdir / "runs" / "mlflow.db").is_file()


def test_gpt2_preset_has_the_shape_of_gpt2() -> None:
    model = load_config("gpt2_124m").model
    assert (model.n_layers, model.n_heads, model.d_model, model.block_size) == (12, 12, 768, 1024)
    assert load_config("gpt2_124m").data.tokenizer == "gpt2"


def test_default_preset_trains_offline(cli, cache: Path) -> None:
    """A few steps; the whole run is a slow test. Each evaluation shows a sample."""
    sets = ["trainer.max_steps=12", "trainer.warmup_steps=2", "trainer.micro_batch_size=4", "trainer.eval_batches=2"]
    sets += ["trainer.eval_every_steps=6", "trainer.log_every_steps=3"]
    sets += [f"data.cache_dir={cache}", "run.device=cpu", "run.threads=1"]
    done = cli("train", "--json", *(part for text in sets for part in ("--set", text)))
    assert done.code == 0, done.err
    assert done.json["final_train_loss"] < done.json["first_train_loss"] - 0.3
    assert done.err.count("[SAMPLE] class -> ") == done.err.count("[EVAL] step") == 2
