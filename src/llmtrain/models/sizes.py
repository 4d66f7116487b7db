"""Sizes that models and their loss choose. Without torch, because the formula of plan/ computes with them too."""

VOCAB_MULTIPLE = 64
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits per chunk of the loss: 64 MB of float32 stay near the caches of a CPU; a GPU needs large matrix products."""
LARGE_CHUNK_ELEMENTS = 1 << 28
"""On a GPU, except for chunks that have float32 copies of their logits. 2,048 positions of a vocabulary of 128,000,
whose gradient (2,048 x width) has about as many tiles as a GPU has multiprocessors."""
TRAINED_CHUNK_ELEMENTS = 1 << 29
"""On a GPU, if the output layer is trained: every chunk reads and writes its whole gradient."""


def padded_vocab_size(vocab_size: int) -> int:
    """The next multiple of 64 if that adds at most 1 % (50257 -> 50304, much faster on a GPU), else vocab_size itself.

    It does not depend on the device, so that a run can move between devices.
    """
    padded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    return padded if padded <= 1.01 * vocab_size else vocab_size
