"""The memory of one process from a formula: in milliseconds and without torch, where tracing a step (memory.py) takes
seconds and torch. For `launch`, and for machines without torch.

It counts what each part of a block keeps for the backward pass, the logits, and what is needed for a moment. The tests
compare it with the traced step.
"""

from llmtrain.config.mixture import is_packed
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import Config
from llmtrain.models.sizes import CHUNK_ELEMENTS, LARGE_CHUNK_ELEMENTS, TRAINED_CHUNK_ELEMENTS
from llmtrain.plan.memory_value import Memory, StepMemory, has_all_gradients, is_sharded, memory_of
from llmtrain.plan.model_shapes import model_shapes
from llmtrain.plan.pair_shapes import with_pair_shapes
from llmtrain.plan.shapes import CannotTell, ModelShapes, StepShapes
from llmtrain.plan.target import ModelSize, Target

__all__ = ["FORMULA_UNCERTAINTY", "CannotTell", "estimate_by_formula"]

FORMULA_UNCERTAINTY = 0.25
PLAIN_LOGIT_BYTES = 12
"""Per logit that is not computed in chunks: float32 logits, their logarithms, and the gradient."""
CHUNK_LOGIT_BYTES = {"cuda": {2: 19, 4: 17}, "cpu": {2: 12, 4: 8}}
"""Per logit of a chunk, by device and bytes of a number: logits, float32 copies, gradient, masks."""


def estimate_by_formula(config: Config, target: Target, saves: int | None = None) -> tuple[ModelSize, Memory]:
    """CannotTell if the weights are not known; activations that are not known are None. `saves`: see memory_of."""
    shapes = model_shapes(config)
    step = _step_memory(with_pair_shapes(config), target, shapes)
    return shapes.size, memory_of(config, target, shapes.weights, step, saves)


def _step_memory(config: Config, target: Target, shapes: ModelShapes) -> StepMemory:
    step = shapes.step
    unknown = shapes.step_unknown
    if isinstance(config.model, HfCausalLmSection) and config.model.attention == "eager":
        step = None
        unknown = "model.attention eager is not in the formula"
    if step is None:
        return StepMemory(None, {}, FORMULA_UNCERTAINTY, {"activations": unknown, "peak": unknown}, True)
    blocks, output = _Formula(config, target, shapes, step).parts()
    parts = {"blocks": blocks, "embeddings and loss": output}
    ordered = dict(sorted(parts.items(), key=lambda item: -item[1]))
    return StepMemory(blocks + output, ordered, FORMULA_UNCERTAINTY, {}, True)


class _Formula:
    def __init__(self, config: Config, target: Target, shapes: ModelShapes, step: StepShapes) -> None:
        trainer = config.trainer
        self.config = config
        self.target = target
        self.shapes = shapes
        self.step = step
        self.tokens = trainer.micro_batch_size * config.model.block_size
        self.is_gpu = target.device == "cuda"
        self.is_compiled = trainer.compile and self.is_gpu  # on a CPU as without: it is not known better
        # Bytes of a number. A Hugging Face model whose weights are stored in bfloat16 computes in it.
        stored = getattr(config.model, "dtype", "float32")
        self.size = 2 if trainer.computes_in_bf16 or stored == "bfloat16" else 4
        self.is_frozen = shapes.weights.trained_bytes < shapes.weights.weight_bytes
        """LoRA."""

    def parts(self) -> tuple[int, int]:
        """Bytes in blocks, and in embeddings, output layer and loss, at the peak of the step."""
        step = self.step
        checkpointing = self.config.trainer.activation_checkpointing
        block = self._block_bytes()
        kept = block
        if checkpointing == "blocks":
            kept = self.tokens * step.width * self.size
        elif checkpointing == "selective":
            kept = self.tokens * self._selective_width() * self.size
        blocks = step.layers * kept
        output = self._output_bytes()
        moment = self._backward_bytes()
        if checkpointing != "none":  # compiled, a block is not in memory as a whole when it is computed again
            moment = max(moment, block) if self.is_compiled else moment + block
        moment += self._kept_output_bytes()
        if moment > output:  # the peak is in the backward pass of the last block
            blocks += moment - self._kept_output_bytes()
            output = self._kept_output_bytes()
        # Without gradients of an earlier micro-batch, they grow while activations are freed.
        weights = self.shapes.weights
        if not has_all_gradients(self.config, self.target) and not is_sharded(self.config, self.target):
            blocks = max(0, blocks + self._output_gradient_bytes() - weights.trained_bytes)
        return int(blocks), int(output)

    def _block_bytes(self) -> int:
        """What a block keeps for the backward pass."""
        step = self.step
        attention = step.query_width + 2 * step.kv_width + step.query_width  # q, k, v and the result
        rotated = step.query_width + step.kv_width
        copies = step.normed_queries
        mlp = {"gelu": 2, "swiglu": 4, "relu2": 1 if self.is_gpu else 2}[step.mlp] * step.d_ff
        norms = 2 * step.width * self.size  # results, which the matrices keep
        residuals = 2 * step.width * self.size
        if self.is_compiled:  # cheap parts are computed again
            if step.mlp == "swiglu":
                mlp -= step.d_ff
            if step.is_hf and not self.is_frozen:
                mlp -= step.d_ff
                norms = 0
        elif step.is_hf or (step.mlp != "gelu" and not self.is_gpu):
            norms += 2 * step.width * 4  # float32 copies of the inputs
            if not self.is_frozen:
                norms += 2 * step.width * self.size
            residuals = 2 * step.width * 4 if self.size == 4 and not self.is_frozen else 0
            if self.size == 4:
                norms -= 2 * step.width * 4
        per_token = (attention + copies * rotated + mlp + step.lora_ranks) * self.size + norms + residuals
        per_token += 4 * step.heads
        if not self.is_gpu and self.size == 2 and step.normed_queries:
            per_token += 4 * rotated
        if step.dropout:
            per_token += self._dropout_bytes()
        # Float32 weights are cast where they are used, and the backward pass uses the copy.
        has_copies = self.size == 2 and self._trains_float32() and not (self.is_compiled and step.is_hf)
        copied = 2 * step.block_matrices if has_copies else 0
        return self.tokens * per_token + copied + self._mask_bytes()

    def _dropout_bytes(self) -> int:
        """Per token: a mask of one byte; on a CPU of a whole number, and attention computes its whole matrix."""
        step = self.step
        if self.is_gpu:
            return 2 * step.width
        return 2 * step.width * self.size + 13 * step.heads * self.config.model.block_size

    def _trains_float32(self) -> bool:
        return self.shapes.weights.bytes_per_trained == 4 and not self.is_frozen

    def _mask_bytes(self) -> int:
        """sdpa needs a mask for packed examples."""
        model = self.config.model
        if not isinstance(model, HfCausalLmSection) or not is_packed(self.config.data):
            return 0
        if model.attention == "sdpa" or not self.is_gpu:
            return self.tokens * model.block_size * self.size
        return 0

    def _selective_width(self) -> int:
        """The input of a block and the result of attention; and, if the weights are trained, what comes before it."""
        step = self.step
        width = step.width + step.query_width
        if not self.is_frozen:
            width += step.query_width + 2 * step.kv_width
        return width

    def _is_chunked(self) -> bool:
        if self.step.is_hf:
            return self.step.has_plain_output
        return self.tokens * self.step.vocab_size > CHUNK_ELEMENTS[self.target.device]

    def _output_bytes(self) -> int:
        """Embeddings, last norm, output layer and loss, at the moment of the loss."""
        step = self.step
        around = 4 * self.tokens * step.width * self.size
        table = step.vocab_size * step.width
        copy = 2 * table if self.size == 2 and self._trains_float32() else 0
        if not self._is_chunked():
            return around + copy + PLAIN_LOGIT_BYTES * self.tokens * step.vocab_size
        total = self.tokens * step.vocab_size
        chunks = -(-total // self._chunk_elements())
        logits = total // chunks
        per_logit = CHUNK_LOGIT_BYTES[self.target.device][self.size]
        if self.is_compiled:  # one kernel, which writes the gradient in the place of the logits
            per_logit = self.size
        if self.is_gpu and chunks > 1:  # the chunk before is freed when the next one exists
            per_logit += self.size
        gradient = self._output_gradient_bytes()
        if self.size == 4 or not self.is_gpu:  # the product is added to it
            gradient += self.size * table if gradient else 0
        return int(around + copy + gradient + per_logit * logits)

    def _chunk_elements(self) -> int:
        if not self.is_compiled:
            return CHUNK_ELEMENTS[self.target.device]
        return LARGE_CHUNK_ELEMENTS if self.is_frozen else TRAINED_CHUNK_ELEMENTS

    def _output_gradient_bytes(self) -> int:
        """The gradient of the output layer exists from the loss on."""
        if self.is_frozen or not self._is_chunked():
            return 0
        return 4 * self.step.vocab_size * self.step.width

    def _kept_output_bytes(self) -> int:
        """Of _output_bytes, what is in memory during the backward pass of blocks."""
        return 3 * self.tokens * self.step.width * self.size + self._output_gradient_bytes()

    def _backward_bytes(self) -> int:
        """For a moment, in the backward pass of a block: gradients of the feed-forward layer and of a matrix."""
        step = self.step
        widths = 2 * step.width + (3 if step.mlp == "swiglu" else 2) * step.d_ff
        gradient = 0 if self.is_frozen else (4 + self.size) * step.width * step.d_ff
        return self.tokens * widths * self.size + gradient
