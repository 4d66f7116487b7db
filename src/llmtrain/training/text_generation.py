"""Text generation, token by token."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from llmtrain.core.arguments import Sampling
from llmtrain.core.logs import warn
from llmtrain.core.seeds import derive_seed
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.errors import DataError, UsageError
from llmtrain.models.base import ModelAdapter, evaluating

Confirm = Callable[[int], int | None]
"""Token that this process has chosen -> token that all processes take, or None to stop before it."""


def until(stop: Callable[[], bool]) -> Confirm:
    """Takes every token of a single process until it is to stop."""
    return lambda token: None if stop() else token


@torch.no_grad()
def sample_ids(
    adapter: ModelAdapter,
    module: nn.Module,
    prompt: Sequence[int],
    sampling: Sampling,
    block_size: int,
    stop_token_ids: Collection[int] = (),
    confirm: Confirm = lambda token: token,
    on_ids: Callable[[Sequence[int]], None] = lambda ids: None,  # noqa: ARG005
) -> list[int]:
    """Token ids that follow the prompt. `on_ids` is called with all new ids after each of them."""
    generator = torch.Generator().manual_seed(derive_seed(sampling.seed, "sample"))
    ids = list(prompt)
    next_logits = adapter.next_logits(module, block_size)
    with evaluating(module), not_compiled(module):
        while len(ids) < len(prompt) + sampling.max_new_tokens:
            logits = next_logits(ids).float()
            best = int(logits.argmax())  # waits for the GPU; the index of a NaN if there is one
            if not math.isfinite(float(logits[best])):  # -inf excludes a token, NaN and inf are errors
                raise DataError(
                    "The model computes values that are not finite: its weights are damaged, or its training diverged.",
                    remedy="Use an earlier checkpoint.",
                    reason="not_finite",
                )
            token = confirm(_choose(logits, best, sampling, generator))
            if token is None:
                break
            ids.append(token)
            on_ids(ids[len(prompt) :])
            if ids[-1] in stop_token_ids:
                break
    return ids[len(prompt) :]


def not_compiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Compiled blocks would be recompiled for every length of the text."""
    is_compiled = any(getattr(part, "_compiled_call_impl", None) for part in module.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def _choose(logits: torch.Tensor, best: int, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return best
    logits = logits.cpu()  # like the generator, so that all devices draw the same
    if sampling.top_k is not None and sampling.top_k < len(logits):
        lowest = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    probabilities = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        probabilities = _nucleus(probabilities, sampling.top_p)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero for all but the fewest most likely tokens that together have at least this probability."""
    values, order = probabilities.sort(descending=True, stable=True)
    is_kept = values.cumsum(-1) - values < top_p  # the probability of all tokens before it
    is_kept[0] = True  # also if top_p is 0 in the precision of the probabilities
    return torch.zeros_like(probabilities).scatter_(0, order[is_kept], values[is_kept])


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a prompt. An empty prompt becomes a line break, because a model needs at least one token; where that
    has no tokens either, the end of a document."""
    try:
        ids = [int(i) for i in tokenizer.encode(text or "\n")]
    except UnicodeEncodeError:
        raise UsageError("The prompt must be valid UTF-8.") from None
    return ids or [tokenizer.end_of_text or 0]


def sample_text(
    adapter: ModelAdapter,
    module: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    sampling: Sampling,
    block_size: int,
    prefix: Sequence[int] = (),
    confirm: Confirm = lambda token: token,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """The text that follows the prompt, up to the end of the document. `prefix`: token ids before the prompt. `on_text`
    is called with the text so far whenever there is more of it."""
    stop_token_ids = adapter.stop_token_ids() | (
        {tokenizer.end_of_text} if tokenizer.end_of_text is not None else set()
    )
    prompted = [*prefix, *prompt_ids(tokenizer, prompt)]
    if len(prompted) > block_size:
        warn("SAMPLE", f"the prompt has {len(prompted):,} tokens; the model sees only the last {block_size:,}")

    def decode(ids: Sequence[int]) -> str:
        # Ids at or above vocab_size only pad the vocabulary.
        return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size and i not in stop_token_ids])

    def decode_so_far(ids: Sequence[int]) -> None:
        if on_text is not None:
            # The last character may be incomplete: its remaining bytes are in tokens to come.
            on_text(decode(ids).rstrip("\N{REPLACEMENT CHARACTER}"))

    ids = sample_ids(adapter, module, prompted, sampling, block_size, stop_token_ids, confirm, decode_so_far)
    return decode(ids)
