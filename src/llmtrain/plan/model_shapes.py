"""The shapes of a model from the fields of its config. Without torch: nothing is built."""

import math
from pathlib import Path

from llmtrain.config.model import AnyGptSection, GptSection, HfCausalLmSection, ModernGptSection
from llmtrain.config.schema import VOCABULARIES, Config
from llmtrain.core.files import read_json
from llmtrain.models.sizes import padded_vocab_size
from llmtrain.plan.hf_shapes import read_hf_shapes
from llmtrain.plan.memory_value import CHARACTERS, WeightSizes
from llmtrain.plan.shapes import CannotTell, ModelShapes, StepShapes
from llmtrain.plan.states import factored_numbers
from llmtrain.plan.target import ModelSize

Shape = tuple[int, ...]


def model_shapes(config: Config) -> ModelShapes:
    """CannotTell for plugins, and where a file that is needed is not on this machine."""
    model = config.model
    if isinstance(model, HfCausalLmSection):
        return read_hf_shapes(config, model)
    if isinstance(model, AnyGptSection):
        vocab_size = model.vocab_size or _vocabulary(config.data.tokenizer or "byte")
        return _gpt2(model, vocab_size) if isinstance(model, GptSection) else _modern(model, vocab_size)
    raise CannotTell(f"it knows GPTs and Hugging Face models, not model {model.name}")


def _vocabulary(tokenizer: str) -> int:
    if tokenizer in VOCABULARIES:
        return VOCABULARIES[tokenizer]
    if tokenizer == "char":
        return CHARACTERS
    values = read_json(Path(tokenizer).expanduser() / "tokenizer.json")
    try:
        vocabulary = values["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        ids += [token["id"] for token in values.get("added_tokens") or []]
        return int(max(ids)) + 1
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CannotTell(f"the vocabulary of tokenizer {tokenizer} is not known here; set model.vocab_size") from None


def _gpt2(model: GptSection, vocab_size: int) -> ModelShapes:
    width = model.d_model
    d_ff = model.d_ff or 4 * width
    matrices = [(3 * width, width), (width, width), (d_ff, width), (width, d_ff)]
    vectors = 9 * width + d_ff  # biases 3 + 1 + 1 and d_ff, two norms of 2
    padded_size = padded_vocab_size(vocab_size)
    tables = [(padded_size, width)] * (1 if model.tie_embeddings else 2)
    outside = [*tables, (model.block_size, width), (2 * width,)]
    step = StepShapes(
        layers=model.n_layers,
        width=width,
        heads=model.n_heads,
        query_width=width,
        kv_width=width,
        d_ff=d_ff,
        mlp="gelu",
        vocab_size=padded_size,
        block_matrices=sum(map(math.prod, matrices)),
        dropout=model.dropout,
    )
    looked_up = model.block_size * width
    return _gpt(model, step, vocab_size, [*matrices, (vectors,)], outside, looked_up)


def _modern(model: ModernGptSection, vocab_size: int) -> ModelShapes:
    shape = model.shape
    width = shape.d_model
    query_width = shape.n_heads * shape.head_dim
    kv_width = shape.n_kv_heads * shape.head_dim
    is_gated = model.mlp == "swiglu"
    up = (2 if is_gated else 1) * shape.d_ff
    matrices = [(query_width + 2 * kv_width, width), (width, query_width), (up, width), (width, shape.d_ff)]
    vectors = 2 * width + (2 * shape.head_dim if is_gated else 0)
    padded_size = padded_vocab_size(vocab_size)
    tables = [(padded_size, width)] * (1 if model.tie_embeddings else 2)
    outside = [*tables, (width,)]
    step = StepShapes(
        layers=shape.n_layers,
        width=width,
        heads=shape.n_heads,
        query_width=query_width,
        kv_width=kv_width,
        d_ff=shape.d_ff,
        mlp=model.mlp,
        vocab_size=padded_size,
        block_matrices=sum(map(math.prod, matrices)),
        normed_queries=2 if is_gated else 1,
    )
    looked_up = 0 if model.tie_embeddings else vocab_size * width
    return _gpt(model, step, vocab_size, [*matrices, (vectors,)], outside, looked_up)


def _gpt(
    model: AnyGptSection,
    step: StepShapes,
    vocab_size: int,
    in_block: list[Shape],
    not_in_blocks: list[Shape],
    looked_up: int,
) -> ModelShapes:
    """`in_block` and `not_in_blocks`: shapes of the weights; vectors as one of their length together."""
    block = sum(map(math.prod, in_block))
    outside = sum(map(math.prod, not_in_blocks))
    largest_matrix = max(math.prod(shape) for shape in in_block if len(shape) == 2)
    parameters = step.layers * block + outside
    weights = WeightSizes(
        parameters=parameters,
        weight_bytes=4 * parameters,
        trained_bytes=4 * parameters,
        bytes_per_trained=4,
        matrices=step.layers * step.block_matrices,
        largest_matrix=largest_matrix,
        largest_trained_bytes=4 * max(largest_matrix, step.vocab_size * step.width),
        outside=outside,
        largest_block=block,
        largest_trained_block=block,
        factored=step.layers * factored_numbers(in_block) + factored_numbers(not_in_blocks),
    )
    flops = 6.0 * (parameters - looked_up) + 12.0 * step.layers * step.width * model.block_size
    return ModelShapes(weights, ModelSize(parameters, parameters, flops, step.layers, vocab_size), step)
