"""The `model` section: one class per kind of model, chosen by `model.name`."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, JsonValue, Tag

from llmtrain.config.section import (
    ClassName,
    MayChange,
    Names,
    Positive,
    PositiveInt,
    Problem,
    Section,
    Share,
    Text,
    kind_tag,
)


class ModelSection(Section):
    """What every kind of model has."""

    name: str
    """Kind of model."""
    block_size: PositiveInt = 128
    """Context length in tokens. Instruction and chat examples are packed or truncated to it."""


class GptSection(ModelSection):
    """A GPT with the GPT-2 architecture, trained from scratch or from GPT-2 weights."""

    name: Literal["gpt"] = "gpt"
    """Kind of model."""
    d_model: PositiveInt = 128
    """Width of the residual stream."""
    n_layers: PositiveInt = 4
    """Number of transformer blocks."""
    n_heads: PositiveInt = 4
    """Number of attention heads per block. Must divide d_model."""
    d_ff: PositiveInt | None = None
    """Width of the feed-forward layer. null means 4 x d_model."""
    dropout: Share = 0.0
    """Dropout probability."""
    tie_embeddings: bool = True
    """Share the token embedding with the output layer."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null takes the tokenizer's."""
    init: MayChange[Text] = "random"
    """`random` (GPT-2 initialization), or a directory in the transformers GPT-2 format to start from."""

    def problems(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            fits = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0 and h <= 4 * self.n_heads]
            yield (
                ("d_model", "n_heads"),
                f"model.d_model {self.d_model} is not divisible by model.n_heads {self.n_heads}. "
                f"Set model.n_heads to one of: {', '.join(map(str, fits))}.",
            )


class DummyGptSection(ModelSection):
    """A bigram model of one embedding and one output layer, for smoke tests."""

    name: Literal["dummy_gpt"] = "dummy_gpt"
    """Kind of model."""
    d_model: PositiveInt = 128
    """Width of the embedding."""
    dropout: Share = 0.0
    """Dropout probability."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null takes the tokenizer's."""


class LoraSection(Section):
    """Low-rank adapters: the base model is frozen, and small matrices beside its layers are trained."""

    rank: PositiveInt = 16
    """Rank of the adapter matrices."""
    alpha: Positive = 32.0
    """Scaling numerator: the adapter is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Dropout on the adapter's input."""
    target_modules: Names = []
    """Suffixes of the names of layers that get an adapter, such as q_proj. Empty means all linear layers except the
    output layer."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rank-stabilized LoRA)."""
    dora: bool = False
    """Train magnitude and direction of each weight separately (DoRA)."""
    quantize: bool = False
    """Load the base model in 4 bits (QLoRA). Requires a GPU and the extra `qlora`."""


class HfCausalLmSection(ModelSection):
    """A Hugging Face causal language model, fine-tuned in full or with LoRA."""

    name: Literal["hf_causal_lm"] = "hf_causal_lm"
    """Kind of model."""
    path: MayChange[Text]
    """Model to fine-tune: a local directory, or a model id on the Hugging Face Hub."""
    revision: MayChange[Text | None] = None
    """Branch, tag or commit of a model on the Hub."""
    tokenizer_path: MayChange[Text | None] = None
    """Directory or Hub id of the tokenizer. null uses the model's own."""
    local_files_only: MayChange[bool] = False
    """Never contact the Hub, as with HF_HUB_OFFLINE=1. A model id must be in the local cache."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. A model on the Hub then requires a commit as revision."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights. With LoRA, bfloat16 halves the memory of the base model and adapters stay float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention implementation of transformers."""
    gradient_checkpointing: MayChange[bool] = False
    """Recompute activations in the backward pass to save memory."""
    lora: LoraSection | None = None
    """Train low-rank adapters. null trains all weights; `{}` uses the defaults."""


class CustomModelSection(ModelSection):
    """A model class of your own (docs/extending.md)."""

    name: ClassName
    """Import path of the class, or the name of an entry point in the group `llmtrain.models`."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null takes the tokenizer's."""
    options: dict[str, JsonValue] = {}
    """Options of the class, validated by its `Options`."""


ModelConfig = Annotated[
    Annotated[GptSection, Tag("gpt")]
    | Annotated[DummyGptSection, Tag("dummy_gpt")]
    | Annotated[HfCausalLmSection, Tag("hf_causal_lm")]
    | Annotated[CustomModelSection, Tag("custom")],
    Discriminator(kind_tag("gpt", "dummy_gpt", "hf_causal_lm")),
]
