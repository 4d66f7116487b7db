"""The numerics of a run: how its numbers are rounded. A run keeps the version that it was started with, so that a
resumed run has the bits of an uninterrupted one.

Version 1: bf16 means autocast, with activations between blocks in float32; a GPT computes all its logits at once.
Version 2: bf16 means that weights are cast to bfloat16 where they are used (compute_dtype.py), without autocast, except
    for classes of the user's own; a GPT with many logits computes its loss in chunks (losses.py); on a GPU, chunks are
    larger, and the gradient of the logits takes their place; LoRA layers with a common input are computed together
    (hf/lora_groups.py).
Version 3: on a GPU, with trainer.compile, the loss of a chunk and its gradient are computed by one kernel
    (loss_kernel.py), which adds in another order. All other runs are the same as in version 2.
Version 4: on a GPU, ReLU^2 of a GPT computes its gradient from its result (gpt/modern.py), and with trainer.compile
    muon's matrix products are computed by one kernel (product_kernel.py). All other runs are the same as in
    version 3.

float32 runs whose logits fit in one chunk, and float32 runs on a CPU of Hugging Face models without LoRA, are the same
in all versions.
"""

from dataclasses import dataclass

LATEST = 4


@dataclass(frozen=True)
class Numerics:
    version: int = LATEST

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
