"""The `model` section: one class per kind of model, chosen by `model.name`."""

# ruff: noqa: RUF012 (pydantic copies the default of a field; ruff sees that only beside the base class)

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, JsonValue, Tag, model_validator

from llmtrain.config.section import (
    PLUGIN_TAG,
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
from llmtrain.config.sizes import DEFAULT_BLOCK_SIZE, DEFAULT_MLP, HEAD_DIM, MAX_LAYERS, MAX_WIDTH, SIZES, fill_shape

Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
FeedForwardWidth = Annotated[int, Field(gt=0, le=8 * MAX_WIDTH)]
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
RopeBase = Annotated[float, Field(ge=1, le=1e12, allow_inf_nan=False)]


class ModelSection(Section):
    """What every kind of model has."""

    name: str
    """Kind of model."""
    block_size: PositiveInt = DEFAULT_BLOCK_SIZE
    """Context length in tokens. Instruction and chat examples are packed or truncated to it."""


class GptSection(ModelSection):
    """A GPT with the GPT-2 architecture, trained from scratch or from GPT-2 weights."""

    name: Literal["gpt"] = "gpt"
    """Kind of model."""
    architecture: Literal["gpt2"] = "gpt2"
    """`gpt2`, or `modern`, which learns faster and has fields of its own."""
    d_model: Width = 128
    """Width of the residual stream."""
    n_layers: Layers = 4
    """Number of transformer blocks."""
    n_heads: PositiveInt = 4
    """Number of attention heads per block. Must divide d_model."""
    d_ff: FeedForwardWidth | None = None
    """Width of the feed-forward layer. null means 4 x d_model."""
    dropout: Share = 0.0
    """Dropout probability."""
    tie_embeddings: bool = True
    """Share the token embedding with the output layer."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null takes the tokenizer's."""
    init: MayChange[Text] = "random"
    """`random` (GPT-2 initialization), or a directory in the transformers GPT-2 format to start from."""

    def matrix_widths(self) -> dict[str, int]:
        """The widths of the blocks' matrices."""
        return {"model.d_model": self.d_model, "model.d_ff": self.d_ff or 4 * self.d_model}

    def problems(self) -> Iterator[Problem]:
        if self.d_model % self.n_heads:
            fits = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0 and h <= 4 * self.n_heads]
            yield _heads_do_not_divide(self.d_model, self.n_heads, fits)


class GptShape(NamedTuple):
    """Counts and widths of a modern GPT, all known."""

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int


class ModernGptSection(ModelSection):
    """A GPT with rotary positions, RMSNorm, QK-norm and no biases, trained from scratch. Two numbers are enough:
    n_layers and d_model, or size. Heads, d_ff, trainer.lr, trainer.micro_batch_size and trainer.grad_accum_steps follow
    from them if they are not set (docs/recipes.md)."""

    name: Literal["gpt"] = "gpt"
    """Kind of model."""
    architecture: Literal["modern"] = "modern"
    """`gpt2` (the default), or `modern`."""
    size: MayChange[Literal["124m", "350m", "774m", "1.5b"] | None] = None
    """Sets n_layers and d_model: 12 and 768, 24 and 1024, 36 and 1280, or 48 and 1600."""
    n_layers: Layers | None = None
    """Number of transformer blocks. null means that of size, or 4."""
    d_model: Width | None = None
    """Width of the residual stream. null means that of size, or 128."""
    n_heads: PositiveInt | None = None
    """Number of attention heads per block. Must divide d_model. null means heads of 128 dimensions (64 if 128 do
    not divide d_model), and at least 4 heads."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads (grouped-query attention). null
    means n_heads."""
    mlp: Literal["swiglu", "relu2"] = DEFAULT_MLP
    """Feed-forward layer: gated `swiglu`, exported as Qwen3, or `relu2` (squared ReLU), exported as NanoChat."""
    d_ff: FeedForwardWidth | None = None
    """Width of the feed-forward layer. null means 4 x d_model; for swiglu 8/3 x d_model, rounded up to a multiple of
    64."""
    rope_theta: RopeBase = 10_000.0
    """Base of the rotary frequencies: 1 to 1e12."""
    tie_embeddings: bool = True
    """Share the token embedding with the output layer."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null takes the tokenizer's."""
    init: MayChange[Text] = "random"
    """`random`, or a directory to start from, in the format that `llmtrain export` writes."""

    @model_validator(mode="before")
    @classmethod
    def _fill_shape(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return fill_shape(values)
        return values  # pydantic refuses it

    @property
    def shape(self) -> GptShape:
        # All are set: see _fill_shape.
        assert self.n_layers is not None
        assert self.d_model is not None
        assert self.n_heads is not None
        assert self.n_kv_heads is not None
        assert self.d_ff is not None
        head_dim = self.d_model // self.n_heads
        return GptShape(self.n_layers, self.d_model, self.n_heads, self.n_kv_heads, head_dim, self.d_ff)

    def matrix_widths(self) -> dict[str, int]:
        """The widths of the blocks' matrices."""
        shape = self.shape
        heads = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
        return {"model.d_model": shape.d_model, "model.d_ff": shape.d_ff, "queries, keys and values": heads}

    def problems(self) -> Iterator[Problem]:
        if self.n_heads is None:
            near = max(HEAD_DIM, round((self.d_model or 0) / HEAD_DIM) * HEAD_DIM)
            yield (
                ("n_heads", "d_model"),
                f"There is no good default for model.n_heads: model.d_model {self.d_model} has few divisors. Set "
                f"model.n_heads, or model.d_model to a multiple of {HEAD_DIM // 2} such as {near}.",
            )
            return
        shape = self.shape
        _, d_model, n_heads, n_kv_heads, _, _ = shape
        if self.size and (shape.n_layers, shape.d_model) != SIZES[self.size]:
            yield self._size_problem(dict(zip(("n_layers", "d_model"), SIZES[self.size], strict=True)))
        fits = [h for h in range(1, d_model // 2 + 1) if d_model % (2 * h) == 0 and h <= 4 * n_heads]
        if d_model % 2:
            text = f"model.d_model must be even, got {d_model}. Set it to {d_model + 1}."
            yield ("d_model",), text
        elif d_model % n_heads:
            yield _heads_do_not_divide(d_model, n_heads, fits)
        elif shape.head_dim % 2:
            yield (
                ("d_model", "n_heads"),
                f"Rotary positions need heads of even width; model.d_model {d_model} / model.n_heads {n_heads} is "
                f"{shape.head_dim}. Set model.n_heads to one of: {', '.join(map(str, fits))}.",
            )
        if n_heads % n_kv_heads:
            groups = [h for h in range(1, n_heads + 1) if n_heads % h == 0]
            yield (
                ("n_heads", "n_kv_heads"),
                f"model.n_heads {n_heads} is not divisible by model.n_kv_heads {n_kv_heads}. Set model.n_kv_heads to "
                f"one of: {', '.join(map(str, groups))}.",
            )

    def _size_problem(self, wanted: dict[str, int]) -> Problem:
        wrong = [field for field in wanted if getattr(self, field) != wanted[field]]
        means = " and ".join(f"model.{field} {wanted[field]}" for field in wrong)
        values = " and ".join(str(getattr(self, field)) for field in wrong)
        return (
            ("size", *wrong),
            f"model.size {self.size} means {means}, but {values} is set. Remove "
            f"{' and '.join(f'model.{field}' for field in wrong)} (or set to null), or set model.size to null.",
        )


AnyGptSection = GptSection | ModernGptSection


def _heads_do_not_divide(d_model: int, n_heads: int, fits: list[int]) -> Problem:
    return (
        ("d_model", "n_heads"),
        f"model.d_model {d_model} is not divisible by model.n_heads {n_heads}. "
        f"Set model.n_heads to one of: {', '.join(map(str, fits))}.",
    )


class DummyGptSection(ModelSection):
    """A bigram model of one embedding and one output layer, for smoke tests."""

    name: Literal["dummy_gpt"] = "dummy_gpt"
    """Kind of model."""
    d_model: Width = 128
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
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = "auto"
    """Attention implementation of transformers. auto uses flex_attention for packed examples on a GPU, else sdpa, or
    eager if the architecture has neither."""
    lora: LoraSection | None = None
    """Train low-rank adapters. null trains all weights; `{}` uses the defaults."""

    @property
    def bytes_per_trained_weight(self) -> int:
        if self.dtype == "bfloat16" and self.lora is None:
            return 2
        return 4  # adapters are float32


class PluginModelSection(ModelSection):
    """A model class of your own (docs/extending.md)."""

    name: ClassName
    """Import path of the class, or the name of an entry point in the group `llmtrain.models`."""
    vocab_size: PositiveInt | None = None
    """Size of the vocabulary. null takes the tokenizer's."""
    options: dict[str, JsonValue] = {}
    """Options of the class, validated by its `Options`."""


def _tag(section: Any) -> str:
    """The tag of a model section: its name, and for `gpt` also its architecture."""
    tag = kind_tag("gpt", "dummy_gpt", "hf_causal_lm")(section)
    values = section
    if not isinstance(section, dict):
        values = vars(section)
    if tag == "gpt" and values.get("architecture") == "modern":
        return "modern"
    return tag


ModelConfig = Annotated[
    Annotated[GptSection, Tag("gpt")]
    | Annotated[ModernGptSection, Tag("modern")]
    | Annotated[DummyGptSection, Tag("dummy_gpt")]
    | Annotated[HfCausalLmSection, Tag("hf_causal_lm")]
    | Annotated[PluginModelSection, Tag(PLUGIN_TAG)],
    Discriminator(_tag),
]
