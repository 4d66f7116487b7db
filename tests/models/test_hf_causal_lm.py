"""`hf_causal_lm` against transformers: logits, loss, gradients, packed examples, files."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.config.data import InstructJsonlSection
from llmtrain.config.model import HfCausalLmSection, LoraSection
from llmtrain.core.targets import IGNORE_INDEX
from llmtrain.data.base import PreparedData
from llmtrain.data.batches import Batch
from llmtrain.data.make_batches import make_batches
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.text_and_examples import Example, Segment
from llmtrain.data.tokenizers.hf import HFTokenizer
from llmtrain.errors import DataError, UsageError
from llmtrain.models.activation_checkpointing import checkpoint_blocks
from llmtrain.models.base import ModelAdapter, parameter_count, trainable_count

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")


import transformers

from llmtrain.compat.numerics import Numerics
from llmtrain.models.hf.causal_lm import CausalLM, HFCausalLMAdapter
from tiny_llama import WORDS, make_model, make_tokenizer, seeded, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.hf

BLOCK = 64
SHAPES: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tie_word_embeddings": False}}
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> HFTokenizer:
    return HFTokenizer(directory)


def make_adapter(directory: Path, **changes: Any) -> HFCausalLMAdapter:
    section = HfCausalLmSection(**{"name": "hf_causal_lm", "path": str(directory), "block_size": BLOCK, **changes})
    return HFCausalLMAdapter(section, tokenizer_vocab=300)


def tiny_gemma2(**changes: Any) -> Any:
    shape = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "sliding_window": 8}
    config = transformers.Gemma2Config(**SMALL, **shape, attn_implementation="eager", **changes)
    return seeded(0, lambda: transformers.Gemma2ForCausalLM(config))


def tiny_of(kind: str, **changes: Any) -> Any:
    """A tiny model of another architecture, by the prefix of its class names."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, **changes)
    return seeded(0, lambda: transformers.AutoModelForCausalLM.from_config(config))


def random_batch(batch: int = 3, length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; some targets have no loss."""
    ids = torch.randint(3, 300, (batch, length + 1), generator=torch.Generator().manual_seed(3))
    targets = ids[:, 1:].clone()
    targets[0, :7] = IGNORE_INDEX
    targets[1] = IGNORE_INDEX
    return ids[:, :-1], targets


# Loss and gradients.


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_equal_transformers(shape: str) -> None:
    module, reference = CausalLM(tiny_llama(**SHAPES[shape]), Numerics()).train(), tiny_llama(**SHAPES[shape]).train()
    inputs, targets = random_batch()
    loss = module(inputs, targets)
    # transformers shifts the labels itself and takes the mean.
    ids = torch.cat([inputs, torch.zeros(3, 1, dtype=torch.long)], 1)
    labels = torch.cat([torch.full((3, 1), IGNORE_INDEX), targets], 1)
    count = int((targets != IGNORE_INDEX).sum())
    expected = reference(ids, labels=labels).loss * count
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    grads = {name.removeprefix("model."): p.grad for name, p in module.named_parameters()}
    expected_grads = {name: p.grad for name, p in reference.named_parameters()}
    assert grads.keys() == expected_grads.keys()
    assert ("lm_head.weight" in grads) == (shape == "untied")
    for name, grad in expected_grads.items():
        assert grad is not None and grad.abs().max() > 0, name  # noqa: PT018
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_logits_equal_transformers() -> None:
    inputs, _ = random_batch()
    with torch.no_grad():
        assert torch.equal(CausalLM(tiny_llama(), Numerics()).eval()(inputs), tiny_llama().eval()(inputs).logits)


def test_output_layer_with_bias() -> None:
    model = tiny_of("Phi", intermediate_size=48)
    assert model.lm_head.bias is not None
    inputs, targets = random_batch()
    with torch.no_grad():
        logits = model.eval()(inputs).logits
        loss = CausalLM(model, Numerics())(inputs, targets)
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    )


@pytest.mark.parametrize("cap", [None, 0.7])
def test_loss_of_softcapped_logits(cap: float | None) -> None:
    model = tiny_gemma2(final_logit_softcapping=cap).train()
    inputs, targets = random_batch()
    loss = CausalLM(model, Numerics())(inputs, targets)
    logits = model(inputs).logits
    assert (float(logits.detach().abs().max()) <= 0.7) == (cap is not None)
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    grad, expected_grad = (torch.autograd.grad(v, model.model.embed_tokens.weight)[0] for v in (loss, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5 * float(expected_grad.abs().max()))


@pytest.mark.parametrize("cap", [None, 30.0])
def test_cap_far_above_the_logits_of_a_new_model_is_found(cap: float | None) -> None:
    adapter = HFCausalLMAdapter.__new__(HFCausalLMAdapter)
    adapter.attention, adapter.vocab_size = "eager", 300
    module = CausalLM(tiny_gemma2(final_logit_softcapping=cap, initializer_range=0.02), Numerics())
    adapter.probe(module)
    assert module.has_linear_head == (cap is None)


def test_context_of_a_model_without_a_number_of_positions(tmp_path: Path) -> None:
    from transformers import BloomConfig

    BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    for block_size in (64, 8192):
        section = HfCausalLmSection(name="hf_causal_lm", path=str(tmp_path), block_size=block_size)
        assert HFCausalLMAdapter(section, 0).context_length() == max(block_size, 4096)


def test_blocks_are_outer_members_of_lists_once_each() -> None:
    def moe() -> nn.Module:
        block = nn.Sequential()
        block.add_module("experts", nn.ModuleList(nn.Linear(2, 2) for _ in range(8)))
        return block

    first, second, third = moe(), moe(), nn.Linear(2, 2)
    module = nn.ModuleDict(
        {
            "layers": nn.ModuleList([first, second, first]),
            "shared": nn.ModuleList([second, nn.ModuleList([nn.ModuleDict({"inner": nn.ModuleList([third])})])]),
        }
    )
    adapter = HFCausalLMAdapter.__new__(HFCausalLMAdapter)
    assert list(adapter.blocks(module)) == [first, second]
    assert list(ModelAdapter.blocks(adapter, module)) == [first, second, third]


def test_adapted_output_layer_is_trained(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=False)
    lora = LoraSection(rank=2, target_modules=["q_proj", "lm_head"])
    adapter = HFCausalLMAdapter(HfCausalLmSection(name="hf_causal_lm", path=str(model), block_size=BLOCK, lora=lora), 0)
    module = adapter.build()
    adapter.probe(module)
    adapter.loss(module, *random_batch()).backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if "lm_head.lora_B" in name}
    assert gradients
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients.values())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Cohere", {"num_key_value_heads": 2, "intermediate_size": 48, "logit_scale": 0.3}),
        ("Granite", {"num_key_value_heads": 2, "intermediate_size": 48, "logits_scaling": 3.0}),
    ],
)
def test_loss_of_scaled_logits(kind: str, changes: dict[str, Any]) -> None:
    model = tiny_of(kind, **changes).eval()
    inputs, targets = random_batch()
    with torch.no_grad():
        expected = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
        assert CausalLM(model, Numerics())(inputs, targets).item() == pytest.approx(expected.item(), rel=1e-5)


# Packed examples.


def make_examples(count: int) -> list[Example]:
    """Examples of 8 to 30 tokens."""
    examples = []
    for number in range(count):
        words = [WORDS[(3 * number + i) % len(WORDS)] for i in range(2 + number % 4)]
        segments = [Segment(" ".join(words), False), Segment(" ".join(reversed(words)), True)]
        examples.append(Example(segments, "file", number + 1, ends_text=True))
    return examples


def make_batch(examples: list[Example], tokenizer: HFTokenizer, packing: bool, size: int) -> Batch:
    """All examples in one micro-batch, as the trainer gets it."""
    store = ExampleStore.from_examples(examples, tokenizer, 1)
    data = InstructJsonlSection(train_file="-", packing=packing)
    train, _ = make_batches(
        PreparedData(tokenizer, store, store, ""),
        data,
        block_size=BLOCK,
        micro_batch_size=size,
        micro_batches=1,
        seed=0,
        vocab_size=300,
        eval_limit=None,
        can_pack=True,
    )
    assert train.steps_in(1) == 1
    return train[0]


def packed_examples(batch: Batch) -> list[tuple[int, int, int]]:
    """(sequence, start, end) of each example, without the padding at the end of a sequence."""
    assert batch.positions is not None
    spans = []
    for sequence, positions in enumerate(batch.positions.tolist()):
        starts = [i for i, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            if (batch.targets[sequence, start:end] != IGNORE_INDEX).any():
                spans.append((sequence, start, end))
    return spans


def max_distance(model: Any, batch: Batch, positions: torch.Tensor | None) -> float:
    """Maximum distance between the logits of packed examples and of the same examples alone."""
    module = CausalLM(model, Numerics()).eval()
    with torch.no_grad():
        packed = module(batch.inputs, positions=positions)
        return max(
            float((packed[i, start:end] - module(batch.inputs[i : i + 1, start:end])[0]).abs().max())
            for i, start, end in packed_examples(batch)
        )


@pytest.fixture(scope="module")
def packed(tokenizer: HFTokenizer) -> Batch:
    batch = make_batch(make_examples(9), tokenizer, packing=True, size=4)
    assert len(packed_examples(batch)) == 9
    assert len({sequence for sequence, _, _ in packed_examples(batch)}) < 5
    return batch


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama-sdpa": lambda: tiny_llama(attn_implementation="sdpa"),
    "llama-eager": lambda: tiny_llama(attn_implementation="eager"),
    "gpt2": tiny_gpt2,
    "gemma2": lambda: tiny_gemma2(final_logit_softcapping=5.0),
    "mistral-sliding": lambda: tiny_of("Mistral", num_key_value_heads=2, intermediate_size=48, sliding_window=8),
    "qwen3": lambda: tiny_of("Qwen3", num_key_value_heads=2, intermediate_size=48, head_dim=8),
}
CANNOT_PACK: dict[str, Callable[[], Any]] = {
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=4)
    ),
    "falcon": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128)
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_examples_do_not_attend_to_each_other(architecture: str, packed: Batch) -> None:
    assert max_distance(ARCHITECTURES[architecture](), packed, packed.positions) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_leak_without_positions(attention: str, packed: Batch) -> None:
    """Control: the distance detects examples that are not separated."""
    assert max_distance(tiny_llama(attn_implementation=attention), packed, None) > 1e-2


@pytest.mark.parametrize("architecture", CANNOT_PACK)
def test_architecture_that_ignores_positions_is_detected(architecture: str, packed: Batch, tmp_path: Path) -> None:
    """transformers silently ignores the positions for some architectures: detect it, or compute correctly."""
    make_tokenizer(tmp_path)
    seeded(0, CANNOT_PACK[architecture]).save_pretrained(tmp_path)
    try:
        adapter = make_adapter(tmp_path, attention="eager")
        module = adapter.build()
    except UsageError:
        return
    distance = max_distance(module.model, packed, packed.positions)
    assert distance < 1e-5 or not adapter.separates_packed_examples(module)


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4)], ids=["full", "lora"])
def test_packed_loss_is_the_sum_of_the_examples(
    directory: Path, tokenizer: HFTokenizer, packed: Batch, lora: LoraSection | None
) -> None:
    adapter = make_adapter(directory, lora=lora)
    module = adapter.build()
    alone = make_batch(make_examples(9), tokenizer, packing=False, size=9)
    assert alone.positions is None
    assert alone.target_count == packed.target_count
    loss = adapter.loss(module, packed.inputs, packed.targets, packed.positions)
    losses = [
        adapter.loss(module, alone.inputs[i : i + 1], alone.targets[i : i + 1]).item() for i in range(len(alone.inputs))
    ]
    padded = adapter.loss(module, alone.inputs, alone.targets)
    assert loss.item() == pytest.approx(sum(losses), rel=1e-5)
    assert padded.item() == pytest.approx(sum(losses), rel=1e-5)
    assert loss.item() != pytest.approx(adapter.loss(module, packed.inputs, packed.targets).item(), rel=1e-4)
    grads, expected_grads = (_trained_gradients(module, value) for value in (loss, padded))
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def _trained_gradients(module: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("is_selective", [False, True], ids=["blocks", "selective"])
def test_packing_with_activation_checkpointing(directory: Path, packed: Batch, is_selective: bool) -> None:
    adapter, gradients = make_adapter(directory), []
    for is_checkpointing in (False, True):
        module = adapter.build()
        if is_checkpointing:
            checkpoint_blocks(adapter.blocks(module), is_selective, has_dropout=True)
        loss = adapter.loss(module, packed.inputs, packed.targets, packed.positions)
        gradients.append(_trained_gradients(module, loss))
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-5, atol=1e-6, msg=name)


# Building.


def test_build_loads_weights_and_build_empty_only_shapes(directory: Path) -> None:
    inputs, _ = random_batch()
    adapter = make_adapter(directory)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()(inputs).logits
        assert torch.equal(adapter.build().eval()(inputs), expected)
    full, empty = adapter.build(), adapter.build_empty()
    assert {name: p.shape for name, p in full.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}
    assert full.training


def test_trainable_parameters(directory: Path) -> None:
    full, tuned = make_adapter(directory).build(), make_adapter(directory, lora=LoraSection(rank=2)).build()
    assert trainable_count(full) == parameter_count(full)
    # rank x (in + out) of q, k, v, o, gate, up and down, in two layers
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    assert trainable_count(tuned) == 2 * sum(2 * (i + o) for i, o in shapes)
    assert parameter_count(tuned) == parameter_count(full) + trainable_count(tuned)


def test_blocks_are_decoder_layers(directory: Path) -> None:
    for lora in (None, LoraSection()):
        adapter = make_adapter(directory, lora=lora)
        assert {type(block).__name__ for block in adapter.blocks(adapter.build())} == {"LlamaDecoderLayer"}


def test_dtype_and_attention_are_applied(directory: Path) -> None:
    module = make_adapter(directory, dtype="bfloat16", attention="eager", lora=LoraSection()).build()
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
    assert module.base.config._attn_implementation == "eager"


def test_adapter_config_names_the_base_model(directory: Path) -> None:
    module = make_adapter(directory, lora=LoraSection()).build()
    assert module.model.peft_config["default"].base_model_name_or_path == str(directory)


def test_base_files_are_config_and_weights(directory: Path) -> None:
    assert [path.name for path in make_adapter(directory).base_files()] == ["config.json", "model.safetensors"]


def test_sharded_weights(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    adapter = make_adapter(tmp_path)
    assert set(parts) < set(adapter.base_files())
    inputs, _ = random_batch()
    with torch.no_grad():
        assert torch.equal(adapter.build().eval()(inputs), model.eval()(inputs).logits)
    parts[0].unlink()
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        make_adapter(tmp_path).build()


def test_frozen_weights_cost_fewer_flops(directory: Path) -> None:
    full, tuned = make_adapter(directory), make_adapter(directory, lora=LoraSection(rank=1))
    module = full.build()
    assert full.flops_per_token(module) >= 6 * parameter_count(module)
    assert 0.6 < tuned.flops_per_token(tuned.build()) / full.flops_per_token(module) < 0.9


# Generation.


def test_kv_cache_does_not_change_logits(directory: Path) -> None:
    adapter = make_adapter(directory, lora=LoraSection())
    module = adapter.build().eval()
    ids = [int(i) for i in random_batch()[0][0]]
    next_logits = adapter.next_logits(module, BLOCK)
    with torch.no_grad():
        for end in (5, 6, 7, 12, 20):
            torch.testing.assert_close(
                next_logits(ids[:end]), module(torch.tensor([ids[:end]]))[0, -1], rtol=1e-4, atol=1e-5
            )


def test_text_longer_than_the_context_window(directory: Path) -> None:
    adapter = make_adapter(directory)
    module = adapter.build().eval()
    ids = [int(i) for i in random_batch()[0][0]]
    next_logits = adapter.next_logits(module, 8)
    with torch.no_grad():
        for end in range(5, 20):
            expected = module(torch.tensor([ids[max(0, end - 8) : end]]))[0, -1]
            torch.testing.assert_close(next_logits(ids[:end]), expected, rtol=1e-4, atol=1e-5)


# Export.


def test_transformers_loads_the_merged_export(directory: Path, tmp_path: Path) -> None:
    adapter = make_adapter(directory, lora=LoraSection(rank=2, alpha=2.0, rslora=True))
    torch.manual_seed(0)
    module = adapter.build().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    inputs, _ = random_batch()
    with torch.no_grad():
        expected = module(inputs)
        adapter.export(module, tmp_path / "out")
        exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert exported.config.use_cache is True
        torch.testing.assert_close(exported(inputs).logits, expected, rtol=1e-4, atol=1e-5)
        base = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        assert (base(inputs).logits - expected).abs().max() > 1e-2


# Invalid input.


def test_tokenizer_larger_than_the_model_is_refused(directory: Path) -> None:
    section = HfCausalLmSection(path=str(directory), block_size=BLOCK)
    with pytest.raises(DataError, match=r"301 tokens.* 300"):
        HFCausalLMAdapter(section, tokenizer_vocab=301)
    assert HFCausalLMAdapter(section, tokenizer_vocab=300).vocab_size == 300


def test_unreadable_weights_are_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may read everything
    with pytest.raises(DataError) as error:
        make_adapter(directory).build()
    assert str(directory / "model.safetensors") in error.value.what


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, vocab_size=300)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        make_adapter(tmp_path).build()


def test_unsupported_attention_is_refused_with_remedy(tmp_path: Path) -> None:
    """This Gemma 2 has no sdpa: the message must name the field. The default takes what it has."""
    make_tokenizer(tmp_path)
    tiny_gemma2().save_pretrained(tmp_path)
    with pytest.raises((DataError, UsageError), match=r"model\.attention"):
        make_adapter(tmp_path, attention="sdpa").build()
    module = make_adapter(tmp_path).build()
    assert module.base.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_trust_remote_code_requires_a_commit() -> None:
    for revision in (None, "main", "a" * 39, "A" * 40):
        section = HfCausalLmSection(
            name="hf_causal_lm", path="somebody/model", trust_remote_code=True, revision=revision, block_size=BLOCK
        )
        with pytest.raises(UsageError, match=r"model\.revision"):
            HFCausalLMAdapter(section, tokenizer_vocab=300)
