"""A real pretrained model, fine-tuned on real examples: a small version of docs/fine-tuning.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from real_model import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.shared, pytest.mark.hf, pytest.mark.timeout(900)]

LOGITS = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, merged, target = sys.argv[1:]
from peft import PeftModel
tokenizer = AutoTokenizer.from_pretrained(merged)
ids = tokenizer("The cat sat on the mat and looked at the dog.", return_tensors="pt").input_ids
adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
merged_model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
assert "llmtrain" not in sys.modules
with torch.no_grad():
    save_file({"ids": ids, "adapted": adapted(ids).logits, "merged": merged_model(ids).logits}, target)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory.mktemp("smollm2"))


def test_lora_lowers_the_validation_loss_and_loads_in_peft(
    cli, model: Path, shared_data: Path, tmp_path: Path, cache: Path
) -> None:
    instruct = shared_data / "instruct"
    val_file = tmp_path / "val.jsonl"
    val_file.write_text("".join((instruct / "val.jsonl").read_text().splitlines(keepends=True)[:8]))
    sets = [f"data.train_file={instruct / 'train.jsonl'}", f"data.val_file={val_file}", f"data.cache_dir={cache}"]
    sets += ["model.block_size=128", "trainer.micro_batch_size=2", "trainer.grad_accum_steps=1", "trainer.lr=2e-3"]
    sets += ["trainer.max_steps=6", "trainer.warmup_steps=1", "trainer.eval_every_steps=null"]
    sets += ["trainer.eval_prompts=What is the capital of France?", "trainer.eval_prompt_tokens=12"]
    sets += ["run.device=cpu", "run.threads=1", f"output.root_dir={tmp_path}", "output.run_id=smol"]
    done = cli("train", "-c", "lora_instruct", "--model-local-dir", str(model), *set_options(sets), "--json")
    assert done.code == 0, done.err
    assert done.json["trainable_parameters"] < 0.05 * done.json["parameters"]
    evaluated = cli("eval", "--run", "smol", "--root", str(tmp_path), "--file", str(val_file), "--json").json
    assert evaluated["loss"] < evaluated["base"]["loss"] - 0.1  # typically 0.15: few examples, few steps
    (sample,) = json.loads((tmp_path / "smol/samples/step_6.json").read_text())
    assert sample["answer"].strip()
    assert (
        cli(
            "export",
            "--run",
            "smol",
            "--root",
            str(tmp_path),
            "--merge",
            "--dtype",
            "float32",
            "--to",
            str(tmp_path / "m"),
        ).code
        == 0
    )
    check_logits(model, tmp_path)


@pytest.mark.parametrize("dtype", ["bf16", "q8_0"])
def test_llama_cpp_continues_as_the_model_does(cli, model: Path, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    done = cli("export", "--model", model, "--format", "gguf", "--dtype", dtype, "--to", tmp_path / dtype, "--json")
    assert done.code == 0, done.err
    check = done.json["check"]
    assert check["chat_template"] is True
    assert check["logits_error"] < (1e-4 if dtype == "bf16" else 0.1)  # it is stored in bfloat16
    assert check["llama_cpp_equal_tokens"] >= 1


def check_logits(model: Path, directory: Path) -> None:
    """Logits of peft and transformers, in a process without llmtrain, against those of llmtrain."""
    import torch
    from safetensors.torch import load_file

    from llmtrain.inference.load import Source, load_model

    out = directory / "logits.safetensors"
    arguments = [str(model), str(directory / "smol/adapter"), str(directory / "m"), str(out)]
    subprocess.run([sys.executable, "-c", LOGITS, *arguments], check=True, cwd=directory)
    expected = load_file(out)
    loaded = load_model(Source(run="smol", root=str(directory)), "cpu")
    with torch.no_grad():
        logits = loaded.module(expected["ids"])
    assert (logits - expected["adapted"]).abs().max() < 1e-5 * logits.abs().max()
    assert (logits - expected["merged"]).abs().max() < 1e-4 * logits.abs().max()


def set_options(sets: list[str]) -> list[str]:
    return [part for text in sets for part in ("--set", text)]
