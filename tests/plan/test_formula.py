"""The formula beside the traced step, and what it does without torch."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.plan import plan_cases as cases

from llmtrain.config.load import load_config
from llmtrain.models import losses
from llmtrain.plan import formula
from llmtrain.plan.fake_model import fake_model
from llmtrain.plan.formula import CannotTell, estimate_by_formula
from llmtrain.plan.hf_shapes import header_shapes
from llmtrain.plan.memory import estimate_memory
from llmtrain.plan.plan import Verdict, judge, plan_by_formula
from llmtrain.plan.target import Target

TOLERANCE = 0.15
LLAMA = cases.LLAMA | {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
EAGER = "trainer.compile=false"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def check(preset: str, overrides: list[str], target: Target) -> None:
    config = load_config(preset, overrides, for_launch=True)
    model = fake_model(config, target.device)
    traced = estimate_memory(config, model, target)
    size, memory = estimate_by_formula(config, target)
    assert size == model.size
    for name in ("weights", "gradients", "optimizer", "gathered", "host", "checkpoint", "disk"):
        assert getattr(memory, name) == getattr(traced, name), name
    assert memory.peak is not None
    assert traced.peak is not None
    assert memory.peak == pytest.approx(traced.peak, rel=TOLERANCE)
    assert memory.is_from_formula


SLOW_GPTS = [
    pytest.param(preset, overrides, marks=pytest.mark.slow)
    for preset, overrides in (
        ("gpt2_124m", [EAGER, "trainer.micro_batch_size=16"]),
        ("gpt2_124m", [EAGER, "trainer.micro_batch_size=1", "trainer.grad_accum_steps=1"]),
        ("gpt2_124m", ["trainer.activation_checkpointing=blocks"]),
        ("gpt_modern_124m", ["trainer.activation_checkpointing=selective"]),
        ("gpt_modern_350m", ["model.tie_embeddings=false"]),
    )
]


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        *SLOW_GPTS,
        ("gpt2_124m", []),
        ("gpt2_124m", [EAGER, "model.dropout=0.1", "trainer.precision=fp32", "trainer.micro_batch_size=8"]),
        ("gpt2_124m", [EAGER, "trainer.activation_checkpointing=blocks", "trainer.micro_batch_size=32"]),
        ("gpt_modern_124m", [EAGER, "trainer.activation_checkpointing=selective", "trainer.micro_batch_size=32"]),
        ("gpt_modern_124m", [EAGER, "model.mlp=swiglu", "model.n_kv_heads=2"]),
    ],
)
def test_formula_agrees_with_the_trace_of_a_gpt(preset: str, overrides: list[str]) -> None:
    check(preset, overrides, Target("cuda", None))


def test_formula_agrees_with_the_trace_of_fsdp() -> None:
    check(
        "gpt_modern_124m",
        [EAGER, "distributed.strategy=fsdp", "trainer.grad_accum_steps=4"],
        Target("cuda", None, None, 1, 4),
    )


@pytest.mark.parametrize("preset", ["gpt_stdlib", "gpt_smoke", "gpt_wikitext"])
def test_formula_agrees_with_the_trace_on_a_cpu(preset: str) -> None:
    check(preset, [], Target("cpu", None))


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.lora=null", "model.dtype=float32", EAGER],
        ["model.lora=null", "model.dtype=float32"],
        ["model.lora.rank=16", EAGER],
        pytest.param(["model.lora.rank=64"], marks=pytest.mark.slow),
        ["model.lora.target_modules=[q_proj, v_proj]", EAGER],
        ["model.lora.quantize=true", EAGER],
        pytest.param(["model.lora.rank=16", "trainer.activation_checkpointing=blocks"], marks=pytest.mark.slow),
    ],
)
def test_formula_agrees_with_the_trace_of_a_llama(llama: Path, overrides: list[str]) -> None:
    check("lora_llama_1b", [f"model.path={llama}", *overrides], Target("cuda", None))


def test_chunks_are_those_of_the_loss() -> None:
    assert formula.CHUNK_ELEMENTS == losses.CHUNK_ELEMENTS
    assert formula.LARGE_CHUNK_ELEMENTS == losses.LARGE_CHUNK_ELEMENTS
    assert formula.TRAINED_CHUNK_ELEMENTS == losses.TRAINED_CHUNK_ELEMENTS


def hf_memory(directory: Path) -> Any:
    config = load_config("lora_llama_1b", [f"model.path={directory}", "model.lora=null"], for_launch=True)
    return estimate_by_formula(config, Target("cuda", 80 << 30))


def test_weights_are_counted_in_the_headers_of_their_files(llama: Path) -> None:
    shapes = {"model.embed_tokens.weight": (64, 16), "model.layers.0.mlp.up_proj.weight": (32, 16)}
    for number, (name, shape) in enumerate(shapes.items()):
        save_file({name: torch.zeros(shape)}, llama / f"{number}.safetensors", {"format": "pt"})
    index = {"weight_map": {name: f"{number}.safetensors" for number, name in enumerate(shapes)}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert header_shapes(llama) == shapes
    size, _ = hf_memory(llama)
    assert size.parameters == sum(map(math.prod, shapes.values()))


def test_damaged_weight_file_is_as_none(llama: Path) -> None:
    before, _ = hf_memory(llama)
    for content in (b"", b"\xff" * 64, (4).to_bytes(8, "little") + b"[1]x"):
        (llama / "model.safetensors").write_bytes(content)
        assert header_shapes(llama) == {}
    assert hf_memory(llama)[0] == before


def test_unknown_architecture_has_weights_but_no_activations(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({**LLAMA, "model_type": "new"}))
    with pytest.raises(CannotTell, match="new"):
        hf_memory(llama)
    save_file({"model.layers.0.weight": torch.zeros(1 << 10, 1 << 10)}, llama / "model.safetensors")
    _, memory = hf_memory(llama)
    assert memory.weights == 2 * (1 << 20)
    assert memory.peak is None
    assert judge(memory, Target("cuda", 80 << 30))[0] is Verdict.UNKNOWN
    assert judge(memory, Target("cuda", 1 << 20))[0] is Verdict.DOES_NOT_FIT  # already without activations


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("lora_llama_1b", ["model.local_files_only=true", "model.path=nobody/nothing"]),
        ("lora_llama_1b", ["model.path=/models/on-the-cluster"]),
        ({"model": {"name": "my_module:Model"}}, []),
        ("gpt_smoke", ["data.tokenizer=/nowhere"]),
    ],
)
def test_formula_cannot_tell(preset: str | dict[str, Any], overrides: list[str]) -> None:
    config = load_config(preset, overrides, for_launch=True)
    with pytest.raises(CannotTell):
        estimate_by_formula(config, Target("cuda", 80 << 30))
    assert plan_by_formula(config, Target("cuda", 80 << 30)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(1.3, Verdict.FITS), (1.1, Verdict.TIGHT), (0.9, Verdict.TIGHT), (0.7, Verdict.DOES_NOT_FIT)],
)
def test_run_that_may_fit_is_not_said_not_to(share: float, verdict: Verdict) -> None:
    config = load_config("gpt2_124m", for_launch=True)
    _, memory = estimate_by_formula(config, Target("cuda", None))
    assert memory.needed is not None
    assert judge(memory, Target("cuda", int(share * memory.needed)))[0] is verdict


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from importlib import util
real = util.find_spec
util.find_spec = lambda name, *rest: None if name == "torch" else real(name, *rest)
from llmtrain.cli import main
main(sys.argv[1:])
"""


def test_plan_without_torch(tmp_path: Path) -> None:
    def plan(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", WITHOUT_TORCH, "plan", "--config", "gpt2_124m", *options]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = plan("--gpu", "h100-80g", "--json")
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["is_from_formula"]
    assert memory["uncertainty"] == 0.25
    assert plan("--gpu", "t4").returncode == 1
    assert plan("--gpu", "h100-80g", "--find").returncode == 64
    assert "from a formula, ±25 %" in plan("--gpu", "h100-80g").stdout
