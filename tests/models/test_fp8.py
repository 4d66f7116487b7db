"""FP8 linear layers on a CPU: their arithmetic, and what they refuse. tests/gpu/test_fp8.py has the rest."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.config.load import load_config
from llmtrain.config.model import GptSection, ModernGptSection
from llmtrain.distributed.world import World
from llmtrain.errors import ConfigError, UsageError
from llmtrain.models import device_precision
from llmtrain.models.compute_dtype import compute_in
from llmtrain.models.fp8 import E4M3, E5M2, Fp8Linear, cast, check_fp8_device, multiplies_in_fp8, scale_of, use_fp8
from llmtrain.models.gpt.adapter import GPTAdapter
from llmtrain.training import components
from llmtrain.training.components import build_components
from llmtrain.training.run import run_training

GPT = ["model.name=gpt", "model.architecture=modern", "model.d_model=64", "model.n_layers=2"]
PAIRS = ["model.name=hf_causal_lm", "model.path=x", "data.name=preference_jsonl", "data.train_file=pairs.jsonl"]
PAIRS += ["trainer.objective.name=dpo"]


def rounded(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """The values that a tensor has in 8 bits, in float32."""
    scale = scale_of(dtype, x)
    return cast(x, scale, dtype).float() * scale


@pytest.mark.parametrize("rows", [32, 7], ids=["32", "7: padded in the backward pass"])
def test_products_are_those_of_the_rounded_matrices(rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 48, generator=generator).requires_grad_()
    weight = (0.1 * torch.randn(32, 48, generator=generator)).requires_grad_()
    upstream = 1e-7 * torch.randn(rows, 32, generator=generator).exp()
    out = Fp8Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    out.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    for found, expected in (
        (out, rounded(x) @ rounded(weight).t()),
        (x.grad, rounded(upstream, E5M2) @ rounded(weight)),
        (weight.grad, rounded(upstream, E5M2).t() @ rounded(x)),
    ):
        assert (found - expected).norm() < 1e-5 * expected.norm()
        assert found.norm() > 0
    assert (out - x @ weight.t()).norm() < 0.06 * out.norm()


def test_expert_without_tokens() -> None:
    layer = nn.Linear(16, 32)
    use_fp8([nn.Sequential(layer)])
    out = layer(torch.zeros(0, 16, requires_grad=True))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_largest_value_is_kept_exactly_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    for size in (1e-12, 1.0, 3e30):
        x = torch.tensor([[0.0, -size, 0.3 * size]])
        assert rounded(x, dtype)[0, 1].item() == pytest.approx(-size)
        assert rounded(x, dtype)[0, 0] == 0
    assert torch.equal(rounded(torch.zeros(2, 2), dtype), torch.zeros(2, 2))
    assert rounded(torch.tensor([[1.0, float("nan")]]), dtype).isnan().any(), "a diverged run must be seen"


@pytest.mark.parametrize("section", [ModernGptSection(n_layers=2, d_model=64), GptSection(n_layers=2, d_model=64)])
def test_gpt_trains_close_to_bf16_and_is_evaluated_in_bf16(section: Any) -> None:
    adapter = GPTAdapter(section, 300)
    torch.manual_seed(0)
    module = adapter.build()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, 300, (2, 16))
    results = []
    for is_fp8 in (False, True):
        each = copy.deepcopy(module)
        if is_fp8:
            use_fp8(adapter.blocks(each))
        compute_in(each, torch.bfloat16)
        with torch.no_grad():
            evaluated = each.eval()(tokens)
        loss = adapter.loss(each.train(), tokens, tokens.roll(1))
        loss.backward()
        results.append((each, evaluated, loss.item()))
    (plain, plain_logits, plain_loss), (fp8, fp8_logits, fp8_loss) = results
    assert torch.equal(plain_logits, fp8_logits)
    assert fp8_loss != plain_loss
    assert fp8_loss == pytest.approx(plain_loss, rel=0.02)
    assert plain.state_dict().keys() == fp8.state_dict().keys(), "nothing more is saved"
    linear = {name for name, part in fp8.named_modules() if multiplies_in_fp8(part)}
    assert linear == {name for name, part in plain.named_modules() if isinstance(part, nn.Linear)}
    plain_parameters = dict(plain.named_parameters())
    for name, parameter in fp8.named_parameters():
        expected = plain_parameters[name].grad
        assert expected is not None
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - expected).norm() < 0.3 * expected.norm(), name


def test_devices_without_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(UsageError, match="needs a GPU with FP8"):
        check_fp8_device(cpu)
    config = load_config(None, [*GPT, "trainer.precision=fp8"])
    with pytest.raises(UsageError, match="needs a GPU with FP8"):
        build_components(config.with_values("run", threads=1), World(device=cpu))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UsageError, match="A100"):
        check_fp8_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_fp8_device(torch.device("cuda"))


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        ([*GPT, "run.device=cpu"], "run.device is cpu"),
        ([*GPT, "model.d_ff=100"], "model.d_ff 100"),
        ([*GPT, "model.d_model=72", "model.n_heads=4"], "model.d_model 72"),
        (["model.name=dummy_gpt"], "got dummy_gpt"),
        (
            ["model.name=hf_causal_lm", "model.path=x", "model.lora.quantize=true", "trainer.optimizer=adamw"],
            "model.lora.quantize",
        ),
        (PAIRS, "trainer.objective dpo"),
    ],
)
def test_configs_that_fp8_cannot_compute_are_refused(sets: list[str], text: str) -> None:
    load_config(None, sets)
    with pytest.raises(ConfigError, match=text):
        load_config(None, [*sets, "trainer.precision=fp8"])


def test_layers_of_other_widths_are_named() -> None:
    with pytest.raises(UsageError, match=r"router \(64 x 5\)"):
        use_fp8([nn.ModuleDict({"router": nn.Linear(64, 5), "up": nn.Linear(64, 128)})])
    with pytest.raises(UsageError, match="has none"):
        use_fp8([])


# LoRA


@pytest.mark.parametrize("is_fp8", [False, True])
def test_expert_with_adapter_but_without_tokens(is_fp8: bool) -> None:
    peft = pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    from llmtrain.models.hf.lora_groups import lora_linear

    expert = nn.Sequential(nn.Linear(16, 32))
    module = peft.get_peft_model(expert, peft.LoraConfig(r=4, target_modules=["0"]))
    if is_fp8:
        use_fp8([module])
    layer = expert[0]
    assert multiplies_in_fp8(layer.base_layer) == is_fp8
    x = torch.zeros(0, 16, requires_grad=True)
    (out,) = lora_linear(x, [layer])
    assert out.shape == (0, 32)
    out.sum().backward()
    assert x.grad is not None
    assert not layer.lora_A["default"].weight.grad.any()


def test_frozen_weights_multiply_in_fp8(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")
    from llmtrain.config.model import HfCausalLmSection, LoraSection
    from llmtrain.models.hf.causal_lm import HFCausalLMAdapter
    from tiny_llama import make_model

    directory = make_model(tmp_path / "model", attention_bias=True)
    tokens = torch.arange(32).view(2, 16) % 90
    for lora in (LoraSection(), LoraSection(dropout=0.1), LoraSection(dora=True)):
        adapter = HFCausalLMAdapter(HfCausalLmSection(path=str(directory), block_size=16, lora=lora), 90)
        results = []
        for is_fp8 in (False, True):
            torch.manual_seed(0)
            module = adapter.build()
            for name, parameter in module.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(parameter, std=0.2)
            if is_fp8:
                use_fp8(adapter.blocks(module))
            compute_in(module, torch.bfloat16)
            torch.manual_seed(1)  # dropout
            loss = adapter.loss(module, tokens, tokens.roll(1))
            loss.backward()
            results.append((module, loss.item()))
        (plain, plain_loss), (fp8, fp8_loss) = results
        assert not any(multiplies_in_fp8(part) for name, part in fp8.named_modules() if "lora_" in name)
        assert fp8_loss != plain_loss
        assert fp8_loss == pytest.approx(plain_loss, rel=0.02)
        plain_parameters = dict(plain.named_parameters())
        for name, parameter in fp8.named_parameters():
            expected = plain_parameters[name].grad
            assert (parameter.grad is None) == (expected is None)
            if expected is not None:
                assert parameter.grad is not None
                assert (parameter.grad - expected).norm() < 0.3 * expected.norm(), name


@pytest.mark.slow  # the GPU tests have it, too; here it needs no GPU
def test_resumed_run_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, make_config: Any) -> None:
    """In one process, with the check of the device left out."""
    monkeypatch.setattr(components, "check_fp8_device", lambda _: None)
    monkeypatch.setattr(device_precision, "has_bf16", lambda _: True)
    sets = {"run__device": "auto", "trainer__precision": "fp8", "trainer__schedule": "constant"}
    sets |= {"trainer__eval_batches": 1, "trainer__eval_every_steps": None, "trainer__max_steps": 4}
    whole = run_training(make_config(**sets), progress="none")
    plain = run_training(make_config(**{**sets, "trainer__precision": "bf16"}), progress="none")
    part = make_config(**sets)
    run_training(part.with_values("trainer", max_steps=2), progress="none")
    resumed = run_training(part, "auto", progress="none")
    assert whole.state_sha256 == resumed.state_sha256 != plain.state_sha256
    assert whole.as_dict()["precision"] == "fp8"
