"""`hf_causal_lm` against transformers itself: logits, loss, gradients, packed rows, files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmtrain.config.data import InstructJsonlSection
from llmtrain.config.model import HfCausalLmSection, LoraSection
from llmtrain.data.base import PreparedData
from llmtrain.data.batches import IGNORE, Batch
from llmtrain.data.examples.example import Row, Segment
from llmtrain.data.make_batches import make_batches
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.tokenizers.tokenizer import HFTokenizer
from llmtrain.errors import DataError, UsageError
from llmtrain.models.base import parameter_count, trainable_count

pytest.importorskip("transformers", reason="needs the hf extra: pip install 'llmtrain[hf]'")
pytest.importorskip("peft", reason="needs the hf extra: pip install 'llmtrain[hf]'")

sys.path.insert(0, str(Path(__file__).parents[1]))

import transformers

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HFTokenizer:
    return HFTokenizer(folder)


def make_adapter(folder: Path, **changes: Any) -> HFCausalLMAdapter:
    section = HfCausalLmSection(**{"name": "hf_causal_lm", "path": str(folder), "block_size": BLOCK, **changes})
    return HFCausalLMAdapter(section, tokenizer_vocab=300)


def tiny_gemma2(**changes: Any) -> Any:
    shape = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "sliding_window": 8}
    config = transformers.Gemma2Config(**SMALL, **shape, attn_implementation="eager", **changes)
    return seeded(0, lambda: transformers.Gemma2ForCausalLM(config))


def tiny_of(kind: str, **changes: Any) -> Any:
    """A model of another architecture, by the beginning of its class names."""
    config = getattr(transformers, f"{kind}Config")(**SMALL, **changes)
    return seeded(0, lambda: transformers.AutoModelForCausalLM.from_config(config))


def some_batch(rows: int = 3, length: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets; some targets carry no loss."""
    ids = torch.randint(3, 300, (rows, length + 1), generator=torch.Generator().manual_seed(3))
    targets = ids[:, 1:].clone()
    targets[0, :7] = IGNORE
    targets[1] = IGNORE
    return ids[:, :-1], targets


# Loss and gradients.


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_of_full_fine_tuning_are_those_of_transformers(shape: str) -> None:
    ours, theirs = CausalLM(tiny_llama(**SHAPES[shape])).train(), tiny_llama(**SHAPES[shape]).train()
    inputs, targets = some_batch()
    loss = ours(inputs, targets)
    # transformers shifts the labels itself and takes the mean.
    ids = torch.cat([inputs, torch.zeros(3, 1, dtype=torch.long)], 1)
    labels = torch.cat([torch.full((3, 1), IGNORE), targets], 1)
    count = int((targets != IGNORE).sum())
    wanted = theirs(ids, labels=labels).loss * count
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    wanted.backward()
    found = {name.removeprefix("model."): p.grad for name, p in ours.named_parameters()}
    others = {name: p.grad for name, p in theirs.named_parameters()}
    assert found.keys() == others.keys()
    assert ("lm_head.weight" in found) == (shape == "untied")
    for name, grad in others.items():
        assert grad is not None and grad.abs().max() > 0, name  # noqa: PT018
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_logits_are_those_of_transformers() -> None:
    inputs, _ = some_batch()
    with torch.no_grad():
        assert torch.equal(CausalLM(tiny_llama()).eval()(inputs), tiny_llama().eval()(inputs).logits)


def test_an_output_layer_with_a_bias() -> None:
    model = tiny_of("Phi", intermediate_size=48)
    assert model.lm_head.bias is not None
    inputs, targets = some_batch()
    with torch.no_grad():
        logits = model.eval()(inputs).logits
        loss = CausalLM(model)(inputs, targets)
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
    )


@pytest.mark.parametrize("cap", [None, 0.7])
def test_softcapped_logits_are_softcapped_in_the_loss_too(cap: float | None) -> None:
    model = tiny_gemma2(final_logit_softcapping=cap).train()
    inputs, targets = some_batch()
    loss = CausalLM(model)(inputs, targets)
    logits = model(inputs).logits
    assert (float(logits.detach().abs().max()) <= 0.7) == (cap is not None)
    wanted = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    mine, other = (torch.autograd.grad(value, model.model.embed_tokens.weight)[0] for value in (loss, wanted))
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Cohere", {"num_key_value_heads": 2, "intermediate_size": 48, "logit_scale": 0.3}),
        ("Granite", {"num_key_value_heads": 2, "intermediate_size": 48, "logits_scaling": 3.0}),
    ],
)
def test_scaled_logits_are_scaled_in_the_loss_too(kind: str, changes: dict[str, Any]) -> None:
    model = tiny_of(kind, **changes).eval()
    inputs, targets = some_batch()
    with torch.no_grad():
        wanted = F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten(), reduction="sum")
        assert CausalLM(model)(inputs, targets).item() == pytest.approx(wanted.item(), rel=1e-5)


# Packed rows.


def rows_of(count: int) -> list[Row]:
    """Rows of 8 to 30 tokens."""
    rows = []
    for number in range(count):
        words = [WORDS[(3 * number + i) % len(WORDS)] for i in range(2 + number % 4)]
        segments = [Segment(" ".join(words), False), Segment(" ".join(reversed(words)), True)]
        rows.append(Row(segments, "rows", number + 1, ends_text=True))
    return rows


def batches_of(rows: list[Row], tokenizer: HFTokenizer, packing: bool, size: int) -> Batch:
    """All rows in one micro-batch, as the trainer gets it."""
    store = ExampleStore.from_examples(rows, tokenizer, 1)
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


def packed_rows(batch: Batch) -> list[tuple[int, int, int]]:
    """(sequence, start, end) of each row; what follows the last one in a sequence is padding."""
    assert batch.positions is not None
    found = []
    for sequence, positions in enumerate(batch.positions.tolist()):
        starts = [i for i, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            if (batch.targets[sequence, start:end] != IGNORE).any():
                found.append((sequence, start, end))
    return found


def furthest(model: Any, batch: Batch, positions: torch.Tensor | None) -> float:
    """How far the logits of packed rows are from those of the rows alone, at most."""
    module = CausalLM(model).eval()
    with torch.no_grad():
        packed = module(batch.inputs, positions=positions)
        return max(
            float((packed[i, start:end] - module(batch.inputs[i : i + 1, start:end])[0]).abs().max())
            for i, start, end in packed_rows(batch)
        )


@pytest.fixture(scope="module")
def packed(tokenizer: HFTokenizer) -> Batch:
    batch = batches_of(rows_of(9), tokenizer, packing=True, size=4)
    assert len(packed_rows(batch)) == 9
    assert len({sequence for sequence, _, _ in packed_rows(batch)}) < 5
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
def test_packed_rows_do_not_see_each_other(architecture: str, packed: Batch) -> None:
    assert furthest(ARCHITECTURES[architecture](), packed, packed.positions) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_without_positions_they_would(attention: str, packed: Batch) -> None:
    """The control: the measure above sees rows that are not kept apart."""
    assert furthest(tiny_llama(attn_implementation=attention), packed, None) > 1e-2


@pytest.mark.parametrize("architecture", CANNOT_PACK)
def test_an_architecture_that_cannot_keep_rows_apart_is_not_packed(
    architecture: str, packed: Batch, tmp_path: Path
) -> None:
    """transformers drops the positions of some architectures without a word. Refuse, or compute it right."""
    make_tokenizer(tmp_path)
    seeded(0, CANNOT_PACK[architecture]).save_pretrained(tmp_path)
    try:
        adapter = make_adapter(tmp_path, attention="eager")
        module = adapter.build()
    except UsageError:
        return
    distance = furthest(module.model, packed, packed.positions)
    assert distance < 1e-5 or not adapter.keeps_rows_apart(module)


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4)], ids=["full", "lora"])
def test_the_loss_of_packed_rows_is_the_sum_of_theirs(
    folder: Path, tokenizer: HFTokenizer, packed: Batch, lora: LoraSection | None
) -> None:
    adapter = make_adapter(folder, lora=lora)
    module = adapter.build()
    alone = batches_of(rows_of(9), tokenizer, packing=False, size=9)
    assert alone.positions is None
    assert alone.target_count == packed.target_count
    loss = adapter.loss(module, packed.inputs, packed.targets, packed.positions)
    each = [
        adapter.loss(module, alone.inputs[i : i + 1], alone.targets[i : i + 1]).item() for i in range(len(alone.inputs))
    ]
    together = adapter.loss(module, alone.inputs, alone.targets)
    assert loss.item() == pytest.approx(sum(each), rel=1e-5)
    assert together.item() == pytest.approx(sum(each), rel=1e-5)
    assert loss.item() != pytest.approx(adapter.loss(module, packed.inputs, packed.targets).item(), rel=1e-4)
    mine, other = (_trained_gradients(module, value) for value in (loss, together))
    for name, grad in other.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-4, atol=1e-5, msg=name)


def _trained_gradients(module: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}


def test_packing_with_gradient_checkpointing(folder: Path, packed: Batch) -> None:
    plain, saving = make_adapter(folder), make_adapter(folder, gradient_checkpointing=True)
    gradients = []
    for adapter in (plain, saving):
        module = adapter.build()
        loss = adapter.loss(module, packed.inputs, packed.targets, packed.positions)
        gradients.append(_trained_gradients(module, loss))
    assert saving.build().base.is_gradient_checkpointing
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad, rtol=1e-5, atol=1e-6, msg=name)


# Building.


def test_build_reads_the_weights_and_build_empty_only_the_shape(folder: Path) -> None:
    inputs, _ = some_batch()
    adapter = make_adapter(folder)
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(inputs).logits
        assert torch.equal(adapter.build().eval()(inputs), theirs)
    full, empty = adapter.build(), adapter.build_empty()
    assert {name: p.shape for name, p in full.named_parameters()} == {n: p.shape for n, p in empty.named_parameters()}
    assert full.training


def test_what_is_trained(folder: Path) -> None:
    full, tuned = make_adapter(folder).build(), make_adapter(folder, lora=LoraSection(rank=2)).build()
    assert trainable_count(full) == parameter_count(full)
    # rank x (in + out) of q, k, v, o, gate, up and down, in two layers
    shapes = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 48), (32, 48), (48, 32)]
    assert trainable_count(tuned) == 2 * sum(2 * (i + o) for i, o in shapes)
    assert parameter_count(tuned) == parameter_count(full) + trainable_count(tuned)


def test_blocks_are_the_layers(folder: Path) -> None:
    for lora in (None, LoraSection()):
        adapter = make_adapter(folder, lora=lora)
        assert {type(block).__name__ for block in adapter.blocks(adapter.build())} == {"LlamaDecoderLayer"}


def test_dtype_and_attention_are_passed_on(folder: Path) -> None:
    module = make_adapter(folder, dtype="bfloat16", attention="eager", lora=LoraSection()).build()
    assert {p.dtype for p in module.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in module.parameters() if p.requires_grad} == {torch.float32}
    assert module.base.config._attn_implementation == "eager"


def test_adapters_name_their_base(folder: Path) -> None:
    module = make_adapter(folder, lora=LoraSection()).build()
    assert module.model.peft_config["default"].base_model_name_or_path == str(folder)


def test_base_files_are_config_and_weights(folder: Path) -> None:
    assert [path.name for path in make_adapter(folder).base_files()] == ["config.json", "model.safetensors"]


def test_a_model_in_several_files(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    model = tiny_llama()
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 1
    adapter = make_adapter(tmp_path)
    assert set(parts) < set(adapter.base_files())
    inputs, _ = some_batch()
    with torch.no_grad():
        assert torch.equal(adapter.build().eval()(inputs), model.eval()(inputs).logits)
    parts[0].unlink()
    with pytest.raises(DataError, match=r"cannot be loaded|lacks weights"):
        make_adapter(tmp_path).build()


def test_flops_of_frozen_weights_are_fewer(folder: Path) -> None:
    full, tuned = make_adapter(folder), make_adapter(folder, lora=LoraSection(rank=1))
    module = full.build()
    assert full.flops_per_token(module) >= 6 * parameter_count(module)
    assert 0.6 < tuned.flops_per_token(tuned.build()) / full.flops_per_token(module) < 0.9


# Writing text.


def test_kept_keys_and_values_change_nothing(folder: Path) -> None:
    adapter = make_adapter(folder, lora=LoraSection())
    module = adapter.build().eval()
    ids = [int(i) for i in some_batch()[0][0]]
    following = adapter.next_logits(module, BLOCK)
    with torch.no_grad():
        for end in (5, 6, 7, 12, 20):
            torch.testing.assert_close(
                following(ids[:end]), module(torch.tensor([ids[:end]]))[0, -1], rtol=1e-4, atol=1e-5
            )


def test_text_longer_than_the_context(folder: Path) -> None:
    adapter = make_adapter(folder)
    module = adapter.build().eval()
    ids = [int(i) for i in some_batch()[0][0]]
    following = adapter.next_logits(module, 8)
    with torch.no_grad():
        for end in range(5, 20):
            wanted = module(torch.tensor([ids[max(0, end - 8) : end]]))[0, -1]
            torch.testing.assert_close(following(ids[:end]), wanted, rtol=1e-4, atol=1e-5)


# Full fine-tuning of a tied model.


def test_export_of_a_merged_model_is_what_transformers_loads(folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(folder, lora=LoraSection(rank=2, alpha=2.0, rslora=True))
    torch.manual_seed(0)
    module = adapter.build().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    inputs, _ = some_batch()
    with torch.no_grad():
        wanted = module(inputs)
        adapter.export(module, tmp_path / "out")
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert found.config.use_cache is True
        torch.testing.assert_close(found(inputs).logits, wanted, rtol=1e-4, atol=1e-5)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert (base(inputs).logits - wanted).abs().max() > 1e-2


# Wrong input.


def test_a_tokenizer_that_is_too_large(folder: Path) -> None:
    section = HfCausalLmSection(path=str(folder), block_size=BLOCK)
    with pytest.raises(DataError, match="301 tokens, the model 300"):
        HFCausalLMAdapter(section, tokenizer_vocab=301)
    assert HFCausalLMAdapter(section, tokenizer_vocab=300).vocab_size == 300


def test_weights_of_another_shape(tmp_path: Path) -> None:
    make_model(tmp_path, vocab_size=300)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(DataError, match=r"another shape|cannot be loaded"):
        make_adapter(tmp_path).build()


def test_an_attention_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Gemma 2 has no sdpa here, and sdpa is the default: whoever names such a model must be told the field."""
    make_tokenizer(tmp_path)
    tiny_gemma2().save_pretrained(tmp_path)
    with pytest.raises((DataError, UsageError), match=r"model\.attention"):
        make_adapter(tmp_path).build()
    assert make_adapter(tmp_path, attention="eager").build()


def test_code_of_the_hub_needs_a_commit() -> None:
    for revision in (None, "main", "a" * 39, "A" * 40):
        section = HfCausalLmSection(
            name="hf_causal_lm", path="somebody/model", trust_remote_code=True, revision=revision, block_size=BLOCK
        )
        with pytest.raises(UsageError, match="commit"):
            HFCausalLMAdapter(section, tokenizer_vocab=300)
