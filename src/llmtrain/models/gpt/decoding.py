"""Generation with a KV cache: on a GPU each step of one token is a replay of a CUDA graph.

Launched from Python, the hundreds of kernels of a step take several times as long as they run.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from llmtrain.models.base import NextLogits
from llmtrain.models.cuda_graph import Replayed
from llmtrain.models.gpt.kv_cache import KVCache, StaticCache
from llmtrain.models.gpt.model import GPT, LanguageModel
from llmtrain.models.gpt.modern import ModernGPT

FIRST_SPAN = 512
"""Places of the cache that the first graph of a text attends to. A longer text gets a graph for twice as many: to
capture one takes as long as a few tokens, and to attend to places without tokens takes time in every step."""
MASK_ALIGNMENT = 16
"""Fused attention copies a mask whose length is not a multiple of this."""


def next_logits_of(module: nn.Module, n_layers: int, block_size: int) -> NextLogits:
    """The logits of the next token, by the fastest way there is for this module."""
    # The ranks of DDP exchange nothing without gradients.
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    if isinstance(inner, GPT | ModernGPT) and _can_replay(inner):
        return ReplayedDecoding(inner, n_layers, block_size)
    return LaunchedDecoding(module, n_layers, block_size)


def _can_replay(module: GPT | ModernGPT) -> bool:
    """Whether the module is ours and not a plugin's subclass, with all weights at fixed addresses on a GPU. FSDP makes
    subclasses too, and gathers the weights in every step."""
    return type(module) in (GPT, ModernGPT) and all(weight.is_cuda for weight in module.parameters())


class LaunchedDecoding:
    """Computes each token once. When the context is full, the last `block_size` tokens are computed again for each
    token: they have other positions then."""

    def __init__(self, module: nn.Module, n_layers: int, block_size: int) -> None:
        self._module = module
        self._block_size = block_size
        self._cache = KVCache(n_layers, block_size)

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        if len(ids) > self._block_size:
            return self._of_full_context(ids[-self._block_size :])
        return self._of_new(ids[self._cache.length :])

    def _of_full_context(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._module(self._tensor(ids))
        return logits[0, -1]  # (V,)

    def _of_new(self, ids: Sequence[int]) -> torch.Tensor:
        logits: torch.Tensor = self._module(self._tensor(ids), cache=self._cache)
        return logits[0, -1]

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=next(self._module.parameters()).device)


class ReplayedDecoding(LaunchedDecoding):
    """The same in steps of fixed shapes, which a GPU replays; without a GPU they are computed each time. The weights
    must not change between calls. All memory is freed with this object."""

    _module: LanguageModel

    def __init__(self, module: LanguageModel, n_layers: int, block_size: int) -> None:
        super().__init__(module, n_layers, block_size)
        self._cache = KVCache(n_layers, -(-block_size // MASK_ALIGNMENT) * MASK_ALIGNMENT)
        self._step: _Step | None = None
        self._full: _FullContext | None = None

    def _of_new(self, ids: Sequence[int]) -> torch.Tensor:
        position = self._cache.length
        if position == 0 or len(ids) > 1:
            return super()._of_new(ids)
        if self._step is None or position >= self._step.span:
            self._step = None  # free its memory first
            self._step = _Step(self._module, self._cache, self._span(position))
        logits = self._step(ids[0], position)
        self._cache.add_one()
        return logits

    def _span(self, position: int) -> int:
        span = FIRST_SPAN
        while span <= position:
            span *= 2
        return min(span, self._cache.layers[0].capacity)

    def _of_full_context(self, ids: Sequence[int]) -> torch.Tensor:
        self._step = None
        if self._full is None:
            self._full = _FullContext(self._module, self._block_size)
        return self._full(ids)


class _Step(Replayed):
    """Logits of the token after the one at a position."""

    def __init__(self, module: LanguageModel, cache: KVCache, span: int) -> None:
        self.span = span
        self._module = module
        self._cache = StaticCache(cache, span)
        device = self._cache.place.position.device
        super().__init__(device)
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def __call__(self, token: int, position: int) -> torch.Tensor:
        self._token.fill_(token)
        self._cache.place.position.fill_(position)
        return self.replay()

    def compute(self) -> torch.Tensor:
        self._cache.place.start_step()
        # Not cuDNN's attention, which compiles for every shape. The flash kernel takes no mask.
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            logits: torch.Tensor = self._module(self._token, cache=self._cache)
        return logits[0, -1].float()


class _FullContext(Replayed):
    """Logits of the token after a full context."""

    def __init__(self, module: LanguageModel, block_size: int) -> None:
        device = next(module.parameters()).device
        super().__init__(device)
        self._module = module
        self._tokens = torch.zeros(1, block_size, dtype=torch.int64, device=device)

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        self._tokens.copy_(torch.tensor([list(ids)]))
        return self.replay()

    def compute(self) -> torch.Tensor:
        hidden = self._module.hidden_states(self._tokens)[:, -1]  # (1, C)
        return self._module.output_logits(hidden)[0].float()
