"""Regression tests of fine-tuned models: precision, export, adapters and their base models, eval."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.config.load import load_config
from llmtrain.config.model import HfCausalLmSection, LoraSection
from llmtrain.models.hf.causal_lm import CausalLM, HFCausalLMAdapter
from slow_cases import some
from tiny_llama import make_examples, make_model, make_tokenizer


@pytest.fixture
def base(workdir: Path) -> Path:
    make_examples(workdir / "train.jsonl", 24)
    make_examples(workdir / "val.jsonl", 6, 100)
    return make_model(workdir / "base")


@pytest.fixture
def tune(cli, base: Path, cache: Path):
    def run(*overrides: str, run_id: str = "mine", more: tuple[str, ...] = ()) -> Any:
        sets = [f"model.path={base}", "model.block_size=64", "model.lora.rank=4", f"data.cache_dir={cache}"]
        sets += ["data.train_file=train.jsonl", "data.val_file=val.jsonl", "trainer.eval_prompts=[]"]
        sets += ["trainer.max_steps=3", "trainer.warmup_steps=0", "run.device=cpu", "run.threads=1"]
        sets += [f"output.run_id={run_id}", *overrides]
        return cli("train", "-c", "lora_instruct", *(part for text in sets for part in ("--set", text)), *more)

    return run


MIXTURES = [
    (precision, dtype, dora)
    for precision in ("fp32", "bf16")
    for dtype in ("float32", "bfloat16")
    for dora in (False, True)
]
A_FEW_MIXTURES = [("fp32", "bfloat16", False), ("bf16", "float32", True), ("bf16", "bfloat16", True)]


@pytest.mark.parametrize("mixture", some(MIXTURES, *A_FEW_MIXTURES))
def test_every_mixture_of_precisions_trains(tune, mixture: tuple[str, str, bool]) -> None:
    precision, dtype, dora = mixture
    done = tune(f"model.lora.dora={dora}".lower(), f"model.dtype={dtype}", f"trainer.precision={precision}")
    assert done.code == 0, done.err


def test_compiled_lora_layer_matches_eager(tmp_path: Path) -> None:
    """torch.compile computes the adapter in another form: the same numbers, with and without autocast."""
    adapter = HFCausalLMAdapter(
        HfCausalLmSection(path=str(make_model(tmp_path)), block_size=32, lora=LoraSection(rank=4)), 0
    )
    module = adapter.build()
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    layer = next(part for name, part in module.named_modules() if name.endswith("q_proj"))
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(2, 5, 32)
    assert torch.allclose(compiled(x), layer(x), atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(compiled(x).float(), layer(x).float(), atol=2e-2)


def softly_capped(folder: Path) -> Path:
    """An architecture that changes its logits in a way that no list of names would catch."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    size = make_tokenizer(folder)
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        lru_width=32,
        logits_soft_cap=0.5,
        attention_window_size=32,
    )
    RecurrentGemmaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("make", "is_plain"), [(make_model, True), (softly_capped, False)])
def test_chunked_loss_is_used_only_where_it_is_exact(tmp_path: Path, make: Any, is_plain: bool) -> None:
    section = HfCausalLmSection(path=str(make(tmp_path / "m")), block_size=16)
    adapter = HFCausalLMAdapter(section, 0)
    module = adapter.build()
    adapter.probe(module)
    assert isinstance(module, CausalLM)
    assert module.has_linear_head is is_plain
    tokens = torch.arange(12).view(2, 6)
    targets = tokens.roll(-1, 1)
    whole = torch.nn.functional.cross_entropy(module.eval()(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    assert torch.allclose(adapter.loss(module, tokens, targets), whole, rtol=1e-5)


def test_answer_ends_at_the_end_token_of_the_model(tune, cli, base: Path, workdir: Path) -> None:
    assert tune().code == 0
    one = ["generate", "--run", "mine", "--prompt", "say red", "--temperature", "0", "--max-new-tokens", "6", "--json"]
    text = cli(*one).json["text"]
    from llmtrain.data.tokenizers.load import load_tokenizer

    first = int(load_tokenizer(str(base)).encode(text)[0])
    for folder in (base, workdir / "runs/mine/model_config"):
        settings = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, first]}))
    assert cli(*one).json["text"] == ""


def test_adapter_on_another_base_of_the_same_shape_is_refused(tune, cli, workdir: Path) -> None:
    assert tune().code == 0
    other = make_model(workdir / "other", seed=1)
    done = cli("eval", "--adapter", "runs/mine/adapter", "--model", str(other), "--file", "val.jsonl")
    assert done.code == 65
    assert "is not the base model of this adapter" in done.err
    assert cli("eval", "--adapter", "runs/mine/adapter", "--file", "val.jsonl").code == 0


def test_exported_adapter_keeps_its_model_card(tune, cli, workdir: Path) -> None:
    assert tune("run.notes=taught to say words").code == 0
    assert cli("export", "--no-check", "--adapter", "runs/mine/adapter", "--merge", "--to", "merged").code == 0
    assert "taught to say words" in (workdir / "merged" / "README.md").read_text()
    assert cli("export", "--no-check", "--model", "base", "--to", "copy").code == 0
    assert "taught to say words" not in (workdir / "copy" / "README.md").read_text()


def test_full_fine_tune_works_without_its_base(tune, cli, base: Path) -> None:
    assert tune("model.lora=null").code == 0
    before = cli("eval", "--run", "mine", "--file", "val.jsonl", "--json").json
    assert before["base"]["loss"] != before["loss"]
    shutil.rmtree(base)
    after = cli("eval", "--run", "mine", "--file", "val.jsonl", "--json")
    assert after.json["loss"] == before["loss"]
    assert after.json["base"] is None
    assert "base model is not evaluated" in after.err
    assert cli("export", "--no-check", "--run", "mine", "--to", "out").code == 0


def test_export_with_an_invalid_generation_config(tune, cli, base: Path) -> None:
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    assert tune().code == 0
    done = cli("export", "--no-check", "--run", "mine", "--merge", "--to", "out")
    assert done.code == 0, done.err


def test_bfloat16_export_has_half_the_size(tune, cli, workdir: Path) -> None:
    assert tune().code == 0
    for dtype in ("float32", "bfloat16"):
        assert cli("export", "--no-check", "--run", "mine", "--merge", "--dtype", dtype, "--to", dtype).code == 0
    whole, half = ((workdir / name / "model.safetensors").stat().st_size for name in ("float32", "bfloat16"))
    assert 0.4 < half / whole < 0.7
    assert cli("export", "--no-check", "--run", "mine", "--dtype", "int8", "--to", "no").code == 64


def test_eval_distinguishes_examples_and_text(tune, cli, workdir: Path) -> None:
    assert tune().code == 0
    shutil.copy(workdir / "val.jsonl", workdir / "val.json")
    examples = cli("eval", "--run", "mine", "--file", "val.json", "--json").json
    assert examples["tokens"] == cli("eval", "--run", "mine", "--file", "val.jsonl", "--json").json["tokens"]
    (workdir / "long.txt").write_text("red green blue " * 200)
    text = ["eval", "--run", "mine", "--json", "--file", "long.txt"]
    assert cli(*text).json["tokens"] > examples["tokens"]
    assert cli(*text, "--file", "val.jsonl").code == 64
    assert cli(*text, "--block-size", "1000").code == 64
    assert cli(*text, "--block-size", "32").code == 0


def test_impossible_combinations_are_refused_early(tune, workdir: Path) -> None:
    for overrides, fact in (
        (["trainer.optimizer=adafactor"], "adafactor"),
        (["trainer.optimizer=muon"], "Use adamw"),
        (["trainer.optimizer=muon", "model.lora.quantize=true"], "Use adamw"),
        (["model.lora.quantize=true", "distributed.strategy=fsdp"], "cannot be sharded"),
        (["model.attention=flex_attention"], "model.attention"),
    ):
        done = tune(*overrides)
        assert done.code == 64, done.err
        assert fact in done.err
        assert not (workdir / "runs").exists()


def test_resume_from_an_older_checkpoint_removes_later_epochs(tune, workdir: Path) -> None:
    epochs = ["trainer.max_epochs=3", "trainer.max_steps=null", "output.layout=epochs", "trainer.keep_checkpoints=5"]
    epochs += ["trainer.eval_every_steps=null"]
    assert tune(*epochs).code == 0
    run = workdir / "runs/mine"
    assert {path.name for path in run.glob("epoch-*")} == {"epoch-1", "epoch-2", "epoch-3"}
    first = min(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))
    again = tune(*epochs, "trainer.max_epochs=2", more=("--resume", str(run / "checkpoints" / f"step_{first}")))
    assert again.code == 0, again.err
    assert {path.name for path in run.glob("epoch-*")} == {"epoch-1", "epoch-2"}


def test_dataset_with_one_split(tune, workdir: Path) -> None:
    (workdir / "set").mkdir()
    shutil.copy(workdir / "train.jsonl", workdir / "set" / "train.jsonl")
    whole = ["data.train_file=null", "data.val_file=null", "data.dataset_name=set", "data.val_split=null"]
    done = tune(*whole, "data.val_fraction=0.25", more=("--dry-run", "--json"))
    assert done.code == 0, done.err
    assert 0 < done.json["val_tokens"] < done.json["train_tokens"]


def test_fine_tuning_presets_match_their_names() -> None:
    lora, llama = load_config("lora_instruct"), load_config("lora_llama_1b")
    assert lora.model.lora
    assert llama.model.lora
    assert (llama.model.dtype, llama.trainer.precision, llama.trainer.compile) == ("bfloat16", "bf16", True)
    assert load_config("full_finetune_small").model.lora is None
    assert load_config("continue_pretrain").data.name == "hf_text"
