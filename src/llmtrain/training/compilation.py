"""What trainer.compile compiles.

Equal blocks are traced and compiled once, the whole model as often as it has blocks: a GPT of 124M parameters starts in
two thirds of the time if it is compiled block by block, and trains 2 % slower (docs/experiments.md)."""

from llmtrain.compat.numerics import CompiledParts
from llmtrain.config.trainer import TrainerSection
from llmtrain.models.base import ModelAdapter
from llmtrain.models.gpt.adapter import GPTAdapter

WHOLE_MODEL_STEPS = 100_000
"""From this length of a run on, compiling the whole model saves more time than it costs at the start, also if the run
is restarted once."""


def compiled_parts(adapter: ModelAdapter, trainer: TrainerSection, steps: int) -> CompiledParts | None:
    """What this run compiles; None without trainer.compile. A resumed run keeps what it has had, whatever its length
    is now. Hugging Face models are always compiled by block; of a plugin's model the blocks are not known well."""
    if not trainer.compile:
        return None
    if adapter.numerics.compiled is not None:
        return adapter.numerics.compiled
    is_by_block = isinstance(adapter, GPTAdapter) and steps < WHOLE_MODEL_STEPS
    return "blocks" if is_by_block else "model"
