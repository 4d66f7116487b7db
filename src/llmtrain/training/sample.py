"""Text from a model, token by token."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from llmtrain.data.sampler import derive_seed
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.errors import UsageError
from llmtrain.logs import warn
from llmtrain.models.base import ModelAdapter, evaluating


@torch.no_grad()
def sample_ids(
    adapter: ModelAdapter,
    module: nn.Module,
    prompt: Sequence[int],
    max_new_tokens: int,
    block_size: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    ends: Collection[int] = (),
    stop: Callable[[], bool] = lambda: False,
    agree: Callable[[int], int] = lambda token: token,
) -> list[int]:
    """The ids that follow the prompt. Temperature 0 takes the likeliest token each time. `agree` makes one choice of
    those of several processes."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
    ids = list(prompt)
    following = adapter.next_logits(module, block_size)
    with evaluating(module), _not_compiled(module):
        while len(ids) < len(prompt) + max_new_tokens and not stop():
            ids.append(agree(_choose(following(ids).float().cpu(), temperature, top_k, generator)))
            if ids[-1] in ends:
                break
    return ids[len(prompt) :]


def _not_compiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Compiled blocks would be compiled again for every length of the text."""
    is_compiled = any(getattr(part, "_compiled_call_impl", None) for part in module.modules())
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < len(logits):
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a prompt. An empty one becomes a line break: the start of a line is something every model has seen."""
    try:
        return [int(i) for i in tokenizer.encode(text or "\n")]
    except UnicodeEncodeError:
        raise UsageError("The prompt is not valid UTF-8.") from None


def sample_text(
    adapter: ModelAdapter,
    module: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    block_size: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
    prefix: Sequence[int] = (),
    agree: Callable[[int], int] = lambda token: token,
) -> str:
    """The text that follows the prompt, up to the end of a document. Ids that only pad the vocabulary are no text.
    `prefix`: ids in front of the prompt's."""
    ends = adapter.stop_token_ids() | ({tokenizer.end_of_text} if tokenizer.end_of_text is not None else set())
    given = [*prefix, *prompt_ids(tokenizer, prompt)]
    if len(given) > block_size:
        warn("TRAIN", f"the prompt has {len(given):,} tokens; the model looks at the last {block_size:,}")
    ids = sample_ids(adapter, module, given, max_new_tokens, block_size, temperature, top_k, seed, ends, stop, agree)
    return tokenizer.decode([i for i in ids if i < tokenizer.vocab_size and i not in ends])
