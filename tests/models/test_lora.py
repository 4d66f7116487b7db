"""LoRA: the fast forward pass against peft's, trainable parameters, saving and loading."""

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


from llmtrain.compat.numerics import Numerics
from llmtrain.models.base import parameter_count
from llmtrain.models.hf import lora_groups
from llmtrain.models.hf.causal_lm import CausalLM, enable_adapters
from llmtrain.models.hf.lora import add_lora, load_adapter, lora_layers, save_adapter, use_fast_forward
from tiny_llama import tiny_gpt2, tiny_llama

pytestmark = pytest.mark.hf


def adapted(model: Any = None, **section: Any) -> Any:
    """A model with adapters that have an effect: B, which is initialized to zero, is filled."""
    base = tiny_llama() if model is None else model
    torch.manual_seed(1)
    result = add_lora(base, LoraSection(**{"rank": 4, "alpha": 8.0, **section}))
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return result


def use_peft_forward(model: Any) -> None:
    """Undo use_fast_forward."""
    for layer in lora_layers(model):
        if hasattr(layer, "peft_forward"):
            del layer.__dict__["forward"]


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(5))


def logits_and_gradients(model: Any, context: Callable[[], Any] = nullcontext) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(7)  # dropout
    with context():
        logits = model(input_ids=tokens(), use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    (logits.float() * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


# The fast forward pass.


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["no-bias", "bias"])
@pytest.mark.parametrize(
    "section", [{}, {"dropout": 0.4}, {"rslora": True}, {"target_modules": ["q_proj", "down_proj"]}]
)
def test_logits_and_gradients_equal_peft(changes: dict[str, Any], section: dict[str, Any]) -> None:
    model = adapted(tiny_llama(**changes), **section).train()
    fast = logits_and_gradients(model)
    assert all(hasattr(layer, "peft_forward") for layer in lora_layers(model))
    use_peft_forward(model)
    expected = logits_and_gradients(model)
    assert fast.keys() == expected.keys()
    assert any("lora_A" in name for name in fast)
    assert any("lora_B" in name for name in fast)
    for name, value in expected.items():
        assert value.abs().max() > 1e-3, name
        torch.testing.assert_close(fast[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def test_dropout_is_active_in_training_only() -> None:
    model = adapted(dropout=0.5)
    plain = adapted()
    assert not torch.allclose(logits_and_gradients(model.train())["logits"], logits_and_gradients(plain)["logits"])
    assert torch.equal(logits_and_gradients(model.eval())["logits"], logits_and_gradients(plain.eval())["logits"])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 emulates it
def test_bf16_autocast(dropout: float) -> None:
    model = adapted(tiny_llama(attention_bias=True), dropout=dropout).train()
    fast = logits_and_gradients(model, bf16)
    exact = logits_and_gradients(model)
    use_peft_forward(model)
    by_peft = logits_and_gradients(model, bf16)
    assert fast["logits"].dtype == by_peft["logits"].dtype == torch.bfloat16
    for name, value in exact.items():
        assert name == "logits" or fast[name].dtype == torch.float32
        distance, peft_distance = ((result[name].float() - value).norm() / value.norm() for result in (fast, by_peft))
        assert 0 < distance < 0.1, name
        assert distance < 2 * peft_distance + 0.01, f"{name}: less accurate than peft"


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bfloat16_base_with_float32_adapters() -> None:
    model = adapted(tiny_llama().bfloat16()).train()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    fast = logits_and_gradients(model, bf16)
    use_peft_forward(model)
    by_peft = logits_and_gradients(model, bf16)
    assert (fast["logits"].float() - by_peft["logits"].float()).norm() < 0.03 * by_peft["logits"].float().norm()
    assert {fast[name].dtype for name in fast if "lora" in name} == {torch.float32}


def test_saves_less_for_backward_than_peft() -> None:
    """The purpose of the fast forward pass: peft saves a second copy of each layer's input."""

    def saved_bytes(model: Any) -> int:
        sizes: dict[int, int] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, nn.Parameter):
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            logits = model(input_ids=tokens(), use_cache=False).logits
        assert logits.requires_grad
        return sum(sizes.values())

    model = adapted().train()
    fast = saved_bytes(model)
    use_peft_forward(model)
    assert fast <= saved_bytes(model)


def test_disabled_adapters_give_the_base_model() -> None:
    model = CausalLM(adapted(), Numerics()).eval()
    with torch.no_grad():
        base, tuned = tiny_llama().eval()(tokens()).logits, model(tokens())
        assert (base - tuned).abs().max() > 1e-2
        enable_adapters(model, False)
        assert torch.equal(model(tokens()), base)
        enable_adapters(model, True)
        assert torch.equal(model(tokens()), tuned)


def test_merging_does_not_change_logits() -> None:
    model = adapted().eval()
    with torch.no_grad():
        tuned = model(input_ids=tokens()).logits
        model.merge_adapter()
        torch.testing.assert_close(model(input_ids=tokens()).logits, tuned, rtol=1e-4, atol=1e-5)
        model.unmerge_adapter()
        torch.testing.assert_close(model.merge_and_unload()(tokens()).logits, tuned, rtol=1e-4, atol=1e-5)


# Trainable parameters.


def test_new_adapter_does_not_change_logits() -> None:
    model = add_lora(tiny_llama(), LoraSection())
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=tokens()).logits, tiny_llama()(tokens()).logits)


def test_only_adapters_are_trainable() -> None:
    model = adapted()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name in trained)
    # All linear layers except the output layer: 7 in each of 2 blocks, two matrices each.
    assert len(trained) == 2 * 7 * 2
    assert not any("lm_head" in name or "embed" in name for name in trained)
    assert logits_and_gradients(model.train()).keys() == {"logits", *trained}


def test_only_target_modules_get_adapters() -> None:
    model = adapted(target_modules=["q_proj", "v_proj"])
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize("names", [["nonsense"], ["q_proj", "nonsense"], ["proj"], ["q_proj", "embed_tokens"]])
def test_unknown_target_module_is_refused_with_known_layers(names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        adapted(target_modules=names)
    assert caught.value.known == sorted(
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    )
    unknown = [name for name in names if name != "q_proj"]
    assert all(name in caught.value.what for name in unknown)
    assert "q_proj" not in caught.value.what


def train_briefly(model: Any, steps: int = 6) -> tuple[float, float]:
    """Loss before and after."""
    module = CausalLM(model.train(), Numerics())
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
def test_training_reduces_the_loss_and_keeps_the_base(section: dict[str, Any]) -> None:
    model = adapted(**section)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before, after = train_briefly(model)
    assert after < before - 0.5
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name


def test_rslora_scales_by_the_square_root_of_the_rank() -> None:
    assert {layer.scaling["default"] for layer in lora_layers(adapted(rank=4, alpha=8.0))} == {2.0}
    assert {layer.scaling["default"] for layer in lora_layers(adapted(rank=4, alpha=8.0, rslora=True))} == {4.0}


def test_dora_trains_magnitudes_with_peft_forward() -> None:
    model = adapted(dora=True)
    assert not any(hasattr(layer, "peft_forward") for layer in lora_layers(model))
    gradients = logits_and_gradients(model.train())
    assert any("lora_magnitude_vector" in name for name in gradients)


# GPT-2, whose layers are Conv1D instead of nn.Linear.


@pytest.mark.parametrize("section", [{}, {"target_modules": ["c_attn"]}], ids=["all", "c_attn"])
def test_gpt2_uses_peft_forward(section: dict[str, Any]) -> None:
    model = adapted(tiny_gpt2(), **section)
    layers = list(lora_layers(model))
    assert layers
    assert not any(hasattr(layer, "peft_forward") for layer in layers)
    with torch.no_grad():
        tuned = CausalLM(model.eval(), Numerics())(tokens())
        merged = adapted(tiny_gpt2(), **section).eval().merge_and_unload()(tokens()).logits
    torch.testing.assert_close(tuned, merged, rtol=1e-4, atol=1e-5)
    before, after = train_briefly(model)
    assert after < before - 0.5


def test_gpt2_lists_its_layers() -> None:
    with pytest.raises(UsageError) as caught:
        adapted(tiny_gpt2(), target_modules=["q_proj"])
    assert caught.value.known == ["c_attn", "c_fc", "c_proj", "lm_head"]


# Files.


def save(model: Any, directory: Path) -> Path:
    tensors = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_adapter(model, tensors, directory, None)
    return directory


@pytest.mark.parametrize("section", [{}, {"dora": True}, {"target_modules": ["q_proj"]}], ids=str)
def test_save_and_load(tmp_path: Path, section: dict[str, Any]) -> None:
    model = adapted(**section).eval()
    directory = save(model, tmp_path / "adapter")
    loaded = load_adapter(tiny_llama(), directory).eval()
    with torch.no_grad():
        expected = model(input_ids=tokens()).logits
        torch.testing.assert_close(loaded(input_ids=tokens()).logits, expected, rtol=1e-5, atol=1e-6)


def test_save_uses_the_given_tensors(tmp_path: Path) -> None:
    """Training continues while an earlier state is written."""
    model = adapted().eval()
    with torch.no_grad():
        expected = model(input_ids=tokens()).logits
        tensors = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
        save_adapter(model, tensors, tmp_path / "adapter", None)
        loaded = load_adapter(tiny_llama(), tmp_path / "adapter").eval()
        torch.testing.assert_close(loaded(input_ids=tokens()).logits, expected, rtol=1e-5, atol=1e-6)


def test_load_refuses_another_shape(tmp_path: Path) -> None:
    directory = save(adapted(), tmp_path / "adapter")
    wide = tiny_llama(hidden_size=64)
    with pytest.raises(DataError, match=r"base model"):
        load_adapter(wide, directory)


def test_load_refuses_other_layers(tmp_path: Path) -> None:
    directory = save(adapted(), tmp_path / "adapter")
    with pytest.raises(DataError, match=r"base model"):
        load_adapter(tiny_gpt2(), directory)


def test_load_refuses_adapter_of_a_deeper_model(tmp_path: Path) -> None:
    """peft would silently ignore the tensors of the third layer."""
    directory = save(adapted(tiny_llama(num_hidden_layers=3), target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(DataError, match=r"base model"):
        load_adapter(tiny_llama(), directory)


def test_load_refuses_adapter_of_a_shallower_model(tmp_path: Path) -> None:
    """The third layer would get a new adapter without effect."""
    directory = save(adapted(target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(DataError, match=r"base model"):
        load_adapter(tiny_llama(num_hidden_layers=3), directory)


def test_load_refuses_adapter_without_weights(tmp_path: Path) -> None:
    directory = save(adapted(), tmp_path / "adapter")
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match=r"adapter_model\.safetensors"):
        load_adapter(tiny_llama(), directory)


def test_load_refuses_damaged_adapter(tmp_path: Path) -> None:
    directory = save(adapted(), tmp_path / "adapter")
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(DataError, match=str(directory)):
        load_adapter(tiny_llama(), directory)


# Layers with a common input, computed together.


def grouped_and_single(section: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    """The same model with and without groups."""
    grouped, single = (adapted(tiny_llama(**changes), **(section or {})).train() for _ in range(2))
    for layer in lora_layers(single):
        del layer.__dict__["forward"]
    use_fast_forward(single, grouped=False)
    return grouped, single


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["no-bias", "bias"])
def test_grouped_layers_equal_single_ones(changes: dict[str, Any]) -> None:
    grouped, single = grouped_and_single(**changes)
    assert {len(layer.lora_group.layers) for layer in lora_layers(grouped)} == {1, 2, 3}
    results, expected = logits_and_gradients(grouped), logits_and_gradients(single)
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def test_input_of_a_group_is_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v; o; gate and up; down: four groups in each of two blocks."""
    calls = []
    products = lora_groups.forward_products
    monkeypatch.setattr(lora_groups, "forward_products", lambda *args: calls.append(args) or products(*args))
    model = adapted()
    logits_and_gradients(model.train())
    assert [len(weights) for _, _, _, weights, _ in calls] == [3, 1, 2, 1] * 2
    group = next(lora_layers(model)).lora_group
    assert (group.input, group.outputs) == (None, [])


def test_group_of_some_target_modules() -> None:
    model = adapted(target_modules=["q_proj", "v_proj", "up_proj"])
    assert [len(layer.lora_group.layers) for layer in lora_layers(model)] == [2, 2, 1] * 2
    fast = logits_and_gradients(model.train())
    use_peft_forward(model)
    for name, value in logits_and_gradients(model).items():
        torch.testing.assert_close(fast[name], value, rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)


def test_group_with_different_inputs() -> None:
    """An architecture may name its layers as Llama does and still give them different inputs."""
    q, k, _ = next(lora_layers(adapted())).lora_group.layers
    first, second = torch.randn(2, 3, 32).unbind()
    with torch.no_grad():
        q(first)
        torch.testing.assert_close(k(second), k.peft_forward(second), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(k(first), k.peft_forward(first), rtol=1e-4, atol=1e-5)


def test_gpu_products_equal_cpu_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the base layer's product adds to the adapter's."""
    generator = torch.Generator().manual_seed(0)
    x, a, b, weight, bias = (torch.randn(*s, generator=generator) for s in ((5, 6), (2, 6), (7, 2), (7, 6), (7,)))
    for one_bias in (bias, None):
        expected = lora_groups.forward_products(x, a, [b], [weight], [one_bias])
        with monkeypatch.context() as patch:
            patch.setattr(lora_groups, "is_gpu", lambda _: True)
            on_gpu = lora_groups.forward_products(x, a, [b], [weight], [one_bias])
        torch.testing.assert_close(on_gpu, expected, rtol=1e-5, atol=1e-5)


def compile_blocks(model: Any) -> None:
    for block in model.get_base_model().model.layers:
        block.compile(backend="aot_eager")


@pytest.mark.slow
def test_compiled_groups_equal_eager_ones_and_compile_once() -> None:
    from torch._dynamo.utils import counters

    eager, compiled = adapted(tiny_llama(num_hidden_layers=3)).train(), adapted(tiny_llama(num_hidden_layers=3)).train()
    torch.compiler.reset()
    counters.clear()
    compile_blocks(compiled)
    expected = logits_and_gradients(eager)
    for name, value in logits_and_gradients(compiled).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5 * float(value.abs().max()), msg=name)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 2  # the first block, whose input needs no gradient, and all others
    positions = [torch.cat([torch.arange(n), torch.arange(12 - n)]).expand(2, -1) for n in (3, 7, 11)]
    module = CausalLM(compiled, Numerics())
    module.has_linear_head = True
    for each in positions:
        module(tokens(), tokens().roll(-1, 1), each).backward()
    packed = counters["stats"]["unique_graphs"]
    for each in positions:
        module(tokens(), tokens().roll(-1, 1), each.flip(0)).backward()
    assert counters["stats"]["unique_graphs"] == packed, "recompiled for another packing"
    assert not counters["graph_break"]


def test_packed_weights_are_counted() -> None:
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    module.weight.quant_state = object()  # as bitsandbytes has it for weights of 4 bits
    assert parameter_count(module) == 16
