"""What the formula knows of a model."""

from dataclasses import dataclass

from llmtrain.plan.memory_value import WeightSizes
from llmtrain.plan.target import ModelSize


class CannotTell(Exception):
    """The formula does not know the model. The message says why."""


@dataclass(frozen=True)
class StepShapes:
    """Widths of what a transformer block computes per token."""

    layers: int
    width: int
    heads: int
    query_width: int
    """Heads times their size; kv_width the same for keys and for values."""
    kv_width: int
    d_ff: int
    mlp: str
    """`gelu`, `swiglu` (gated) or `relu2`."""
    vocab_size: int
    block_matrices: int
    """Weights in the matrices of a block."""
    normed_queries: int = 0
    """Copies of queries and keys that norms and rotary positions keep in addition."""
    dropout: float = 0.0
    is_hf: bool = False
    """Its norms are several operations, which keep float32 copies of their input."""
    has_plain_output: bool = True
    """Nothing follows the output layer, so that a Hugging Face model computes its loss in chunks."""
    lora_ranks: int = 0
    """Sum of the ranks of a block's adapters; 0 without LoRA."""


@dataclass(frozen=True)
class ModelShapes:
    weights: WeightSizes
    size: ModelSize
    step: StepShapes | None
    """None if the architecture is not known: its weights are, and the activations are not."""
    step_unknown: str = ""
