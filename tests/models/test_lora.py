"""Adapters: our forward pass against peft's, and what may be asked of peft through the config."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.config.model import LoraSection
from llmtrain.errors import DataError, UsageError

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")

sys.path.insert(0, str(Path(__file__).parents[1]))

from llmtrain.models.hf.causal_lm import CausalLM, set_adapters
from llmtrain.models.hf.lora import add_lora, load_adapter, lora_layers, save_adapter
from tiny_llama import tiny_gpt2, tiny_llama

pytestmark = pytest.mark.hf


def adapted(model: Any = None, **section: Any) -> Any:
    """A model with adapters that do something: B, which begins as zeros, is filled."""
    given = tiny_llama() if model is None else model
    torch.manual_seed(1)
    found = add_lora(given, LoraSection(**{"rank": 4, "alpha": 8.0, **section}))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return found


def by_peft(model: Any) -> None:
    """Undo speed_up: every layer computes as peft does."""
    for layer in lora_layers(model):
        if hasattr(layer, "peft_forward"):
            del layer.__dict__["forward"]


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(5))


def logits_and_gradients(model: Any, around: Callable[[], Any] = nullcontext) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)  # dropout
    with around():
        logits = model(input_ids=tokens(), use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    (logits.float() * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


# Our forward pass.


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    "section", [{}, {"dropout": 0.4}, {"rslora": True}, {"target_modules": ["q_proj", "down_proj"]}]
)
def test_values_and_gradients_are_those_of_peft(changes: dict[str, Any], section: dict[str, Any]) -> None:
    model = adapted(tiny_llama(**changes), **section).train()
    ours = logits_and_gradients(model)
    assert all(hasattr(layer, "peft_forward") for layer in lora_layers(model))
    by_peft(model)
    theirs = logits_and_gradients(model)
    assert ours.keys() == theirs.keys()
    assert any("lora_A" in name for name in ours)
    assert any("lora_B" in name for name in ours)
    for name, wanted in theirs.items():
        assert wanted.abs().max() > 1e-3, name
        torch.testing.assert_close(ours[name], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()), msg=name)


def test_dropout_drops_and_only_in_training() -> None:
    model = adapted(dropout=0.5)
    plain = adapted()
    assert not torch.allclose(logits_and_gradients(model.train())["logits"], logits_and_gradients(plain)["logits"])
    assert torch.equal(logits_and_gradients(model.eval())["logits"], logits_and_gradients(plain.eval())["logits"])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_bf16_autocast(dropout: float) -> None:
    model = adapted(tiny_llama(attention_bias=True), dropout=dropout).train()
    ours = logits_and_gradients(model, bf16)
    exact = logits_and_gradients(model)
    by_peft(model)
    theirs = logits_and_gradients(model, bf16)
    assert ours["logits"].dtype == theirs["logits"].dtype == torch.bfloat16
    for name, wanted in exact.items():
        assert name == "logits" or ours[name].dtype == torch.float32
        distance, of_peft = ((found[name].float() - wanted).norm() / wanted.norm() for found in (ours, theirs))
        assert 0 < distance < 0.1, name
        assert distance < 2 * of_peft + 0.01, f"{name}: further from float32 than peft's own"


def test_a_base_in_bfloat16_with_adapters_in_float32() -> None:
    model = adapted(tiny_llama().bfloat16()).train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    ours = logits_and_gradients(model, bf16)
    by_peft(model)
    theirs = logits_and_gradients(model, bf16)
    assert (ours["logits"].float() - theirs["logits"].float()).norm() < 0.03 * theirs["logits"].float().norm()
    assert {ours[name].dtype for name in ours if "lora" in name} == {torch.float32}


def test_only_the_input_is_kept_for_the_backward_pass() -> None:
    """What it is for: peft keeps a copy of each layer's input for the adapter too."""

    def kept(model: Any) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            logits = model(input_ids=tokens(), use_cache=False).logits
        assert logits.requires_grad
        return sum(sizes.values())

    model = adapted().train()
    ours = kept(model)
    by_peft(model)
    assert ours <= kept(model)


def test_switched_off_it_is_the_base_model() -> None:
    model = CausalLM(adapted()).eval()
    with torch.no_grad():
        base, tuned = tiny_llama().eval()(tokens()).logits, model(tokens())
        assert (base - tuned).abs().max() > 1e-2
        set_adapters(model, False)
        assert torch.equal(model(tokens()), base)
        set_adapters(model, True)
        assert torch.equal(model(tokens()), tuned)


def test_merged_it_computes_the_same() -> None:
    model = adapted().eval()
    with torch.no_grad():
        tuned = model(input_ids=tokens()).logits
        model.merge_adapter()
        torch.testing.assert_close(model(input_ids=tokens()).logits, tuned, rtol=1e-4, atol=1e-5)
        model.unmerge_adapter()
        torch.testing.assert_close(model.merge_and_unload()(tokens()).logits, tuned, rtol=1e-4, atol=1e-5)


# What is trained.


def test_a_new_adapter_changes_nothing() -> None:
    model = add_lora(tiny_llama(), LoraSection())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens()).logits, tiny_llama()(tokens()).logits)


def test_only_adapters_are_trained() -> None:
    model = adapted()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name in trained)
    # All linear layers but the output layer: 7 in each of 2 blocks, two matrices each.
    assert len(trained) == 2 * 7 * 2
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert logits_and_gradients(model.train()).keys() == {"logits", *trained}


def test_target_modules_are_all_that_get_one() -> None:
    model = adapted(target_modules=["q_proj", "v_proj"])
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize("names", [["nonsense"], ["q_proj", "nonsense"], ["proj"], ["q_proj", "embed_tokens"]])
def test_a_target_that_is_not_there_is_refused_with_those_that_are(names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        adapted(target_modules=names)
    assert caught.value.known == sorted(
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    )
    strangers = [name for name in names if name != "q_proj"]
    assert all(name in caught.value.what for name in strangers)
    assert "q_proj" not in caught.value.what


def train_a_little(model: Any, steps: int = 6) -> tuple[float, float]:
    """Loss before and after."""
    module = CausalLM(model.train())
    inputs = tokens()
    targets = inputs.roll(-1, 1)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=2e-2)
    losses = []
    for _ in range(steps):
        loss = module(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize(
    "section", [{}, {"dora": True}, {"rslora": True}, {"dora": True, "rslora": True, "dropout": 0.1}], ids=str
)
def test_every_kind_learns_and_leaves_the_base_alone(section: dict[str, Any]) -> None:
    model = adapted(**section)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before, after = train_a_little(model)
    assert after < before - 0.5
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name


def test_rslora_scales_by_the_root_of_the_rank() -> None:
    assert {layer.scaling["default"] for layer in lora_layers(adapted(rank=4, alpha=8.0))} == {2.0}
    assert {layer.scaling["default"] for layer in lora_layers(adapted(rank=4, alpha=8.0, rslora=True))} == {4.0}


def test_dora_trains_magnitudes_through_pefts_own_forward() -> None:
    model = adapted(dora=True)
    assert not any(hasattr(layer, "peft_forward") for layer in lora_layers(model))
    found = logits_and_gradients(model.train())
    assert any("lora_magnitude_vector" in name for name in found)


# GPT-2, whose layers are no nn.Linear.


@pytest.mark.parametrize("section", [{}, {"target_modules": ["c_attn"]}], ids=["all", "c_attn"])
def test_gpt2_works_through_pefts_own_forward(section: dict[str, Any]) -> None:
    model = adapted(tiny_gpt2(), **section)
    layers = list(lora_layers(model))
    assert layers
    assert not any(hasattr(layer, "peft_forward") for layer in layers)
    with torch.no_grad():
        tuned = CausalLM(model.eval())(tokens())
        merged = adapted(tiny_gpt2(), **section).eval().merge_and_unload()(tokens()).logits
    torch.testing.assert_close(tuned, merged, rtol=1e-4, atol=1e-5)
    before, after = train_a_little(model)
    assert after < before - 0.5


def test_gpt2_names_its_layers() -> None:
    with pytest.raises(UsageError) as caught:
        adapted(tiny_gpt2(), target_modules=["q_proj"])
    assert caught.value.known == ["c_attn", "c_fc", "c_proj", "lm_head"]


# Files.


def saved(model: Any, folder: Path) -> Path:
    tensors = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(model, tensors, folder)
    return folder


@pytest.mark.parametrize("section", [{}, {"dora": True}, {"target_modules": ["q_proj"]}], ids=str)
def test_saved_and_loaded(tmp_path: Path, section: dict[str, Any]) -> None:
    model = adapted(**section).eval()
    folder = saved(model, tmp_path / "adapter")
    back = load_adapter(tiny_llama(), folder).eval()
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
        torch.testing.assert_close(back(input_ids=tokens()).logits, wanted, rtol=1e-5, atol=1e-6)


def test_what_is_saved_is_the_copy_that_was_given(tmp_path: Path) -> None:
    """The model trains on while an earlier state of it is written."""
    model = adapted().eval()
    with torch.no_grad():
        wanted = model(input_ids=tokens()).logits
        tensors = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
        save_adapter(model, tensors, tmp_path / "adapter")
        back = load_adapter(tiny_llama(), tmp_path / "adapter").eval()
        torch.testing.assert_close(back(input_ids=tokens()).logits, wanted, rtol=1e-5, atol=1e-6)


def test_an_adapter_for_another_shape_is_refused(tmp_path: Path) -> None:
    folder = saved(adapted(), tmp_path / "adapter")
    wide = tiny_llama(hidden_size=64)
    with pytest.raises(DataError, match="made for another base model"):
        load_adapter(wide, folder)


def test_an_adapter_for_other_layers_is_refused(tmp_path: Path) -> None:
    folder = saved(adapted(), tmp_path / "adapter")
    with pytest.raises(DataError, match="made for another base model"):
        load_adapter(tiny_gpt2(), folder)


def test_an_adapter_for_a_deeper_model_is_refused(tmp_path: Path) -> None:
    """Its tensors for the third layer would be left out without a word."""
    folder = saved(adapted(tiny_llama(num_hidden_layers=3), target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(DataError, match="made for another base model"):
        load_adapter(tiny_llama(), folder)


def test_an_adapter_for_a_shallower_model_is_refused(tmp_path: Path) -> None:
    """The third layer would get a new adapter that does nothing."""
    folder = saved(adapted(target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(DataError, match="made for another base model"):
        load_adapter(tiny_llama(num_hidden_layers=3), folder)


def test_an_adapter_without_weights_is_refused(tmp_path: Path) -> None:
    folder = saved(adapted(), tmp_path / "adapter")
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no adapter_model\.safetensors"):
        load_adapter(tiny_llama(), folder)


def test_a_damaged_adapter_is_refused(tmp_path: Path) -> None:
    folder = saved(adapted(), tmp_path / "adapter")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match=str(folder)):
        load_adapter(tiny_llama(), folder)
