"""The numerics of a run: how its numbers are rounded. A run keeps the version that it was started with, so that a
resumed run has the bits of an uninterrupted one.

Version 1: bf16 means autocast, with activations between blocks in float32; a GPT computes all its logits at once.
Version 2: bf16 means that weights are cast to bfloat16 where they are used (compute_dtype.py), without autocast, except
    for plugins; a GPT with many logits computes its loss in chunks (losses.py); on a GPU, chunks are
    larger, and the gradient of the logits takes their place; LoRA layers with a common input are computed together
    (hf/lora_groups.py).
Version 3: on a GPU, with trainer.compile, the loss of a chunk and its gradient are computed by one kernel
    (loss_kernel.py), which adds in another order. All other runs are the same as in version 2.
Version 4: on a GPU, ReLU^2 of a GPT computes its gradient from its result (gpt/modern.py), and with trainer.compile
    muon's matrix products are computed by one kernel (product_kernel.py). All other runs are the same as in
    version 3.
Version 5: LoRA on a multimodal model adapts only the layers that text reaches (hf/probes.py). All other runs are
    the same as in version 4.
Version 6: with trainer.compile, a GPT is compiled block by block, unless the run is long
    (training/compilation.py). All other runs are the same as in version 5.

float32 runs whose logits fit in one chunk, and float32 runs on a CPU of Hugging Face models without LoRA, are the same
in all versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from llmtrain.errors import CheckpointError

LATEST = 6
CompiledParts = Literal["model", "blocks"]
"""Whether trainer.compile compiles the model as a whole, or its blocks one by one: they round differently."""


@dataclass(frozen=True)
class Numerics:
    version: int = LATEST
    compiled: CompiledParts | None = None
    """What the run compiles; None if it has not been decided."""

    @classmethod
    def recorded(cls, state: Mapping[str, Any], run_id: str) -> "Numerics":
        """The numerics that a checkpoint or meta.json of a run records. Version 1 is not recorded."""
        version = state.get("numerics", 1)
        if type(version) is not int or not 1 <= version <= LATEST:
            raise CheckpointError(
                f"Run '{run_id}' was trained with numerics version {version!r}; this llmtrain has the "
                f"versions 1 to {LATEST}.",
                remedy="Use the version of llmtrain that trained it, or a later one.",
            )
        compiled = state.get("compiled")
        if version < 6:
            compiled = "model"
        return cls(version, compiled if compiled in get_args(CompiledParts) else None)

    @property
    def casts_weights(self) -> bool:
        """Whether bf16 casts the weights, instead of the inputs of each operation (autocast)."""
        return self.version >= 2

    @property
    def chunks_gpt_loss(self) -> bool:
        """Whether a GPT with many logits computes its loss in chunks."""
        return self.version >= 2

    @property
    def groups_lora(self) -> bool:
        """Whether LoRA layers with a common input are computed together."""
        return self.version >= 2

    @property
    def has_large_chunks(self) -> bool:
        """Whether the loss on a GPU is computed in larger chunks of equal size, with the gradient in the place of the
        logits."""
        return self.version >= 2

    @property
    def has_loss_kernel(self) -> bool:
        """Whether the loss of a chunk is computed by our own kernel on a GPU, in a compiled run."""
        return self.version >= 3

    @property
    def saves_one_relu2(self) -> bool:
        """Whether ReLU^2 on a GPU computes its gradient from its result, and not from its input."""
        return self.version >= 4

    @property
    def has_muon_kernel(self) -> bool:
        """Whether muon's matrix products are computed by our own kernel on a GPU, in a compiled run."""
        return self.version >= 4

    @property
    def adapts_text_layers(self) -> bool:
        """Whether LoRA leaves out the layers that text does not reach."""
        return self.version >= 5


def recorded_attention(model: Mapping[str, Any]) -> str:
    """The value that `model.attention: auto` has for a run with this recorded model section: before `auto` was the
    default, sdpa was, and configs did not record it."""
    return str(model.get("attention", "sdpa"))
