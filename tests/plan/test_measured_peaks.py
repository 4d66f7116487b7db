"""Predicted peaks beside those that one H200 had (docs/experiments.md; torch 2.11, bf16, compiled)."""

from pathlib import Path
from typing import Any

import pytest
from tests.plan.plan_cases import EXAMPLES, LLAMA_1B, make_llama

from llmtrain.config.load import load_config
from llmtrain.core.gpus import find_gpu
from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.memory import estimate_memory
from llmtrain.plan.target import Target

H200 = Target("cuda", find_gpu("h200").memory_bytes, find_gpu("h200"))
GPT2: dict[str, Any] = {"name": "gpt", "n_layers": 12, "d_model": 768, "n_heads": 12, "block_size": 1024}
MODERN: dict[str, Any] = {"name": "gpt", "architecture": "modern", "size": "124m", "block_size": 1024}


def predicted_gb(model: dict[str, Any], data: dict[str, Any], **trainer: Any) -> float:
    fields = {"precision": "bf16", "compile": True, "grad_accum_steps": 1, **trainer}
    config = load_config({"model": model, "data": data, "trainer": fields}, for_launch=True)
    peak = estimate_memory(config, fake_model(config, "cuda"), H200).peak
    assert peak is not None
    return peak / 1e9


@pytest.mark.parametrize(
    ("model", "trainer", "measured"),
    [
        (GPT2, {"micro_batch_size": 64}, 23.3),
        pytest.param(MODERN, {"micro_batch_size": 64}, 20.9, marks=pytest.mark.slow),
        (MODERN, {"micro_batch_size": 16}, 7.9),
        ({**MODERN, "size": "350m"}, {"micro_batch_size": 16, "optimizer": "muon"}, 17.1),
    ],
)
def test_peak_of_gpt_is_what_was_measured(model: dict[str, Any], trainer: dict[str, Any], measured: float) -> None:
    data = {"name": "dummy_text", "tokenizer": "gpt2"}
    assert predicted_gb(model, data, **trainer) == pytest.approx(measured, rel=0.03)


@pytest.mark.hf
@pytest.mark.parametrize(
    ("model", "measured"),
    [
        ({"dtype": "bfloat16", "lora": {"rank": 16}}, 23.9),
        pytest.param({"dtype": "float32"}, 32.4, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, 24.4, marks=pytest.mark.slow),
    ],
)
def test_peak_of_fine_tuning_is_what_was_measured(tmp_path: Path, model: dict[str, Any], measured: float) -> None:
    section = {**make_llama(tmp_path, LLAMA_1B), "block_size": 2048, **model}
    assert predicted_gb(section, EXAMPLES, micro_batch_size=8) == pytest.approx(measured, rel=0.03)
