"""Model sizes, and the defaults that follow from them: shape of the model, batch and learning rate.

The numbers are resolved when a config is loaded, and recorded: a later change of a formula does not change a run.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

DEFAULT_LAYERS = 4
DEFAULT_WIDTH = 128
DEFAULT_MLP: Literal["swiglu", "relu2"] = "relu2"
DEFAULT_BLOCK_SIZE = 128

# Size -> (n_layers, d_model); with GPT-2's vocabulary each has about that many parameters.
SIZES = {"124m": (12, 768), "350m": (24, 1024), "774m": (36, 1280), "1.5b": (48, 1600)}

HEAD_DIM = 128
MIN_HEADS = 4
MIN_HEAD_DIM = 16
"""Smallest dimension of default heads, unless the width is below MIN_HEADS times that."""
D_FF_MULTIPLE = 64

# At n_layers 12 and d_model 768: peak learning rate, and tokens per step.
REFERENCE = SIZES["124m"]
LEARNING_RATES = {"adamw": 6e-4, "adafactor": 6e-4, "muon": 0.01}
BATCH_TOKENS = {"adamw": 65_536, "adafactor": 65_536, "muon": 16_384}
MAX_LEARNING_RATES = {"adamw": 5e-3, "adafactor": 5e-3, "muon": 0.02}
MICRO_BATCH_TOKENS = 65_536
MIN_BATCH_TOKENS = 2**11
MAX_BATCH_TOKENS = 2**24
# Several times those of the largest models so far.
MAX_WIDTH = 2**17
MAX_LAYERS = 10_000


class Batch(NamedTuple):
    micro_batch_size: int
    grad_accum_steps: int


def default_heads(d_model: int) -> int | None:
    """Heads of 128 dimensions, or 64 if 128 do not divide the width, or as many as do; at least 4 heads, and an even
    number of dimensions. None if only heads of a few dimensions divide the width."""
    most = min(HEAD_DIM, max(2, d_model // MIN_HEADS))
    fits = [size for size in range(2, most + 1, 2) if d_model % size == 0]
    head_dim = max(fits, default=1)
    if head_dim < HEAD_DIM and HEAD_DIM // 2 in fits:
        head_dim = HEAD_DIM // 2
    is_odd = d_model % 2 == 1  # no number of heads fits: the schema asks for an even width
    if is_odd or head_dim >= min(MIN_HEAD_DIM, most):
        return d_model // head_dim
    return None


def default_d_ff(d_model: int, mlp: str) -> int:
    """4 x d_model; of `swiglu`, which has a third matrix, 8/3 x d_model, rounded up to a multiple of 64."""
    if mlp == "relu2":
        return 4 * d_model
    return math.ceil(8 * d_model / 3 / D_FF_MULTIPLE) * D_FF_MULTIPLE


def default_lr(optimizer: str, d_model: int) -> float:
    """The learning rate of 124m, divided by the width relative to it (muon's by the square root), up to a limit: the
    highest that was measured to be good."""
    width = d_model / REFERENCE[1]
    divisor = width
    if optimizer == "muon":
        divisor = math.sqrt(width)
    return _rounded(min(MAX_LEARNING_RATES[optimizer], LEARNING_RATES[optimizer] / divisor))


def default_batch_tokens(optimizer: str, n_layers: int, d_model: int) -> int:
    """Tokens per step: those of 124m times the number of weights in the blocks relative to it, to the power of 0.7,
    as a power of two, at least 2,048 and at most 16,777,216."""
    weights = (n_layers * d_model**2) / (REFERENCE[0] * REFERENCE[1] ** 2)
    tokens = int(2 ** round(math.log2(BATCH_TOKENS[optimizer] * weights**0.7)))
    return min(max(tokens, MIN_BATCH_TOKENS), MAX_BATCH_TOKENS)


def default_batch(
    optimizer: str,
    n_layers: int,
    d_model: int,
    block_size: int,
    micro_batch_size: int | None,
    steps: int | None,
    processes: int = 1,
) -> Batch:
    """Sequences per micro-batch, and micro-batches per step, that give default_batch_tokens. The activations of a
    micro-batch are at most those of 65,536 tokens of 124m. `micro_batch_size`, `steps`: None if they are not set; if
    neither is, there is a micro-batch for each process."""
    sequences = max(1, default_batch_tokens(optimizer, n_layers, d_model) // block_size)
    if micro_batch_size is None:
        activations = n_layers * d_model / (REFERENCE[0] * REFERENCE[1])
        most = max(1, int(MICRO_BATCH_TOKENS / activations / block_size))
        if processes > 1:
            most = min(most, max(1, sequences // processes))
        if steps:
            micro_batch_size = max(1, sequences // steps)
        else:
            micro_batch_size = min(sequences, 2 ** int(math.log2(most)))  # a power of two
    return Batch(micro_batch_size, steps or max(1, round(sequences / micro_batch_size)))


def fill_shape(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a modern GPT with those that are missing or null. What cannot be used is left for the schema to
    refuse."""
    filled = dict(values)
    n_layers, d_model = SIZES.get(str(filled.get("size")), (DEFAULT_LAYERS, DEFAULT_WIDTH))
    _fill(filled, "n_layers", n_layers)
    _fill(filled, "d_model", d_model)
    _fill(filled, "mlp", DEFAULT_MLP)
    if _is_count(filled["d_model"], MAX_WIDTH):
        _fill(filled, "n_heads", default_heads(filled["d_model"]))
        _fill(filled, "d_ff", default_d_ff(filled["d_model"], filled["mlp"]))
    if _is_count(filled.get("n_heads")):
        _fill(filled, "n_kv_heads", filled["n_heads"])
    return filled


def fill_trainer(
    trainer: Mapping[str, Any], model: Mapping[str, Any], optimizer: str, processes: int = 1
) -> dict[str, Any]:
    """The trainer's fields with learning rate and batch for a modern GPT of this shape (see fill_shape)."""
    filled = dict(trainer)
    n_layers = model["n_layers"]
    d_model = model["d_model"]
    block_size = model.get("block_size", DEFAULT_BLOCK_SIZE)
    size = filled.get("micro_batch_size")
    steps = filled.get("grad_accum_steps")
    is_shape = _is_count(n_layers, MAX_LAYERS) and _is_count(d_model, MAX_WIDTH) and _is_count(block_size)
    is_batch = all(count is None or _is_count(count) for count in (size, steps))
    if not is_shape or not is_batch or optimizer not in LEARNING_RATES:
        return filled
    _fill(filled, "lr", default_lr(optimizer, d_model))
    batch = default_batch(optimizer, n_layers, d_model, block_size, size, steps, processes)
    for name, value in batch._asdict().items():
        _fill(filled, name, value)
    return filled


def _fill(values: dict[str, Any], name: str, value: Any) -> None:
    if values.get(name) is None:
        values[name] = value


def _is_count(value: object, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most


def _rounded(rate: float) -> float:
    """To two digits: 0.00045 rather than 0.00044999999999999996."""
    return float(f"{rate:.1e}")
