"""Fine-tuning a multimodal model on text: its vision tower gets no gradient and no adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmtrain

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")

from safetensors.torch import load_file

from llmtrain.compat.numerics import Numerics
from llmtrain.training import run as training_run
from tiny_llama import make_examples, make_tokenizer, seeded

pytestmark = pytest.mark.hf
Make = Callable[..., llmtrain.Config]


def make_gemma3(directory: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": make_tokenizer(directory),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    seeded(0, lambda: Gemma3ForConditionalGeneration(config)).save_pretrained(directory)


@pytest.fixture
def make(workdir: Path) -> Make:
    make_gemma3(workdir / "gemma3")
    make_examples(workdir / "examples.jsonl", 12)

    def config(run_id: str, max_steps: int, lora: dict[str, Any] | None) -> llmtrain.Config:
        return llmtrain.load_config(
            {
                "run": {"name": "gemma", "threads": 1, "device": "cpu"},
                "model": {"name": "hf_causal_lm", "path": "gemma3", "block_size": 64, "lora": lora},
                "data": {"name": "instruct_jsonl", "train_file": "examples.jsonl", "val_file": "examples.jsonl"},
                "trainer": {"max_steps": max_steps, "schedule": "constant", "micro_batch_size": 2, "lr": 1e-3},
                "output": {"run_id": run_id, "report": False},
            },
            ["data.packing=false", "data.cache_dir=cache", "trainer.warmup_steps=0", "trainer.eval_every_steps=null"],
        )

    return config


def train(config: llmtrain.Config, resume: str | None = None) -> llmtrain.TrainResult:
    return llmtrain.train(config, resume=resume, progress="log")


def adapted_names(result: llmtrain.TrainResult, step: int) -> set[str]:
    return set(load_file(result.run_dir / "checkpoints" / f"step_{step}" / "model.safetensors"))


@pytest.mark.parametrize("lora", [None, {"rank": 2}, {"rank": 2, "target_modules": ["q_proj"]}])
def test_resume_is_exact(make: Make, lora: dict[str, Any] | None) -> None:
    whole = train(make("whole", 4, lora))
    train(make("resumed", 2, lora))
    assert train(make("resumed", 4, lora), resume="resumed").state_sha256 == whole.state_sha256


def test_lora_leaves_out_what_text_does_not_reach(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    names = adapted_names(train(make("lora", 1, {"rank": 2})), 1)
    assert len(names) == 2 * 7 * 2  # layers, linear layers in each, matrices
    assert not [name for name in names if "vision_tower" in name]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "LoRA adapts" in line]
    assert "LoRA adapts 14 layers: down_proj, gate_proj" in line
    assert "model.vision_tower" in line
    assert llmtrain.generate("lora", "red", max_new_tokens=2) is not None  # loads the adapter again


def test_targets_that_text_does_not_reach_are_refused(make: Make) -> None:
    with pytest.raises(llmtrain.UsageError, match=r"fc1.*model\.vision_tower"):
        train(make("lora", 1, {"rank": 2, "target_modules": ["fc1"]}))


def test_run_of_an_earlier_version_resumes_with_its_adapters(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before numerics version 5, the vision tower had adapters, without optimizer state."""
    with monkeypatch.context() as patched:
        patched.setattr(training_run, "recorded_numerics", lambda _: Numerics(4))
        whole = train(make("whole", 4, {"rank": 2}))
        assert [name for name in adapted_names(whole, 4) if "vision_tower" in name]
        train(make("resumed", 2, {"rank": 2}))
    assert train(make("resumed", 4, {"rank": 2}), resume="resumed").state_sha256 == whole.state_sha256
