"""Whether a micro-batch is certainly too large for the memory of a CPU, and the largest that fits."""

from dataclasses import dataclass
from math import ceil

from llmtrain.config.data import ExampleBatchesSection
from llmtrain.config.mixture import data_sections
from llmtrain.config.schema import Config
from llmtrain.errors import LlmtrainError
from llmtrain.models.sizes import CHUNK_ELEMENTS
from llmtrain.plan.fake_model import FakeModel, UnknownModel, fake_model
from llmtrain.plan.memory import estimate_memory
from llmtrain.plan.memory_value import HEAP_FACTOR, Memory
from llmtrain.plan.pair_shapes import as_examples
from llmtrain.plan.target import Target

TRACED_CHUNKS = 4
"""Of the loss. A micro-batch with more of them is not traced, because each takes milliseconds: from there on, every
sequence needs as much as the one before."""
MARGIN = 1.2
"""By which the activations may be overestimated."""
WIDE_MARGIN = 2.0
"""The same for compiled blocks, which are traced as if they kept nothing but their inputs, and for examples: the loss
leaves out the tokens of prompts, which are not known here."""


@dataclass(frozen=True)
class TooLarge:
    need_bytes: int
    """At least, for all processes of a node."""
    largest: int | None
    """Sequences that fit; 0 if not even one does, None if unknown."""


@dataclass(frozen=True)
class _StepMemory:
    """Memory of one process, by the number of sequences in its micro-batch."""

    states: int
    per_sequence: float
    rest: float
    process: float
    """Libraries, and what the optimizer needs in addition."""
    margin: float

    def least(self, sequences: int) -> int:
        return self.states + int(max(0.0, self.rest + self.per_sequence * sequences) / self.margin)

    def largest(self, memory: int) -> int | None:
        if self.least(1) > memory:
            return 0
        left = (memory - self.process) / HEAP_FACTOR - self.states - self.rest
        if self.per_sequence <= 0 or left < self.per_sequence:
            return None
        return int(left / self.per_sequence)


def check_micro_batch(config: Config, target: Target, shape: tuple[int, int], has_states: bool) -> TooLarge | None:
    """None if a micro-batch of this shape (sequences, tokens) may fit in the memory of a node, and if that is not
    known. Without `has_states` gradients and the optimizer's averages are not counted."""
    assert target.memory_bytes is not None
    sequences, tokens = shape
    memory = target.memory_bytes // target.processes_per_node
    try:
        step = _step_memory(config, target, sequences, tokens, has_states)
    except (LlmtrainError, UnknownModel):
        return None
    if step is None or step.least(sequences) <= memory:
        return None
    return TooLarge(step.least(sequences) * target.processes_per_node, step.largest(memory))


def _step_memory(config: Config, target: Target, sequences: int, tokens: int, has_states: bool) -> _StepMemory | None:
    trainer = config.trainer
    if trainer.compile:  # which activations are kept is the compiler's choice
        config = config.with_values("trainer", compile=False, activation_checkpointing="blocks")
    model = fake_model(config, target.device)
    config = as_examples(config)  # the shape is known
    if trainer.compile and not model.adapter.blocks(model.module):
        return None

    # Traced twice, for what a sequence needs
    few_chunks = TRACED_CHUNKS * CHUNK_ELEMENTS["cpu"]
    large = min(sequences, max(2, ceil(few_chunks / (tokens * model.adapter.vocab_size))))
    small = max(1, large // 2)
    config = config.with_values("model", block_size=tokens)  # a batch of short examples is narrower
    estimate = _estimate(config, model, target, large)
    activations = estimate.activations
    if activations is None or estimate.peak is None:
        return None
    per_sequence = activations / large
    if small < large:
        smaller = _estimate(config, model, target, small).activations
        if smaller is None:
            return None
        per_sequence = (activations - smaller) / (large - small)

    states = estimate.weights
    if has_states:
        states += estimate.gradients
        if trainer.max_steps != 1:  # the first update allocates them
            states += estimate.optimizer
    # Pairs too: see as_examples.
    has_prompts = isinstance(data_sections(config.data)[0], ExampleBatchesSection)
    return _StepMemory(
        states=states,
        per_sequence=per_sequence,
        rest=activations - per_sequence * large,
        process=max(0.0, estimate.peak - HEAP_FACTOR * (estimate.at_least + activations)),
        margin=WIDE_MARGIN if trainer.compile or has_prompts else MARGIN,
    )


def _estimate(config: Config, model: FakeModel, target: Target, sequences: int) -> Memory:
    return estimate_memory(config.with_values("trainer", micro_batch_size=sequences), model, target)
