"""What the model in memory computes: to be asked before an export changes it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmtrain.data.records.base import BadRecord
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.chat_template import ChatTemplate, Message, has_chat_template, load_in_transformers
from llmtrain.errors import DataError
from llmtrain.inference.load import LoadedModel
from llmtrain.models.base import evaluating
from llmtrain.models.hf.causal_lm import CausalLM

TEXT_TOKENS = 64
"""Tokens of a text whose logits are compared."""
POSITIONS = 8
"""Last positions of each text at which logits are compared: they depend on all tokens before them."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
PROMPT_TOKENS = 16
NEW_TOKENS = 32
MESSAGES: list[Message] = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And  3 + 4?\nAnswer briefly."},
]
# Composed characters only: some programs do not normalize text.
_TEXTS = (
    "The capital of France is Paris, and its river is the Seine.",
    "def add(a, b):\n    return a + b  # 2 + 2 == 4\n",
    "It's 12:30 on 2026-11-19; they'll pay $1,234.56 (or 99%), won't they?",
    "Él está aquí. Größe, naïve, Ελληνικά, русский язык.",
    "東京は日本の首都です。한국어 العربية हिन्दी",
    "🙂 👩‍👩‍👧 🇩🇪 — “quotes” … ½ ©",
    "  two  spaces\tand a tab\r\n\n\nthree line breaks   ",
)


@dataclass(frozen=True)
class Expected:
    """What the model in memory computes."""

    texts: list[str]
    ids: list[list[int]]
    special_tokens: dict[str, int | None]
    stop_ids: list[int]
    conversation: str | None
    """MESSAGES in the chat template; None without one."""
    sequences: list[list[int]]
    logits: list[torch.Tensor]
    """Of the last positions of each sequence: (positions, vocabulary)."""
    prompt: list[int]
    continuation: list[int]
    continued_text: str
    choices: torch.Tensor
    """Logits from which each token of the continuation was chosen: (tokens, vocabulary)."""
    context_length: int
    rounding_error: float = 0.0
    """How much the logits were changed by rounding the weights to the data type of the export (see logits_error)."""


@torch.no_grad()
def expect(loaded: LoadedModel) -> Expected:
    module = _in_float32(loaded.module)
    texts = check_texts(loaded.tokenizer)
    ids = [[int(token) for token in loaded.tokenizer.encode(text)] for text in texts]
    context_length = loaded.adapter.context_length()
    sequences = [tokens[: min(TEXT_TOKENS, context_length)] for tokens in ids if tokens]
    prompt = sequences[0][: max(1, min(PROMPT_TOKENS, context_length // 2))]
    stop_ids = _stop_ids(loaded)
    with evaluating(module):
        logits = [last_logits(loaded, module, tokens) for tokens in sequences]
        if not all(each.isfinite().all() for each in logits):
            raise DataError(
                "The model computes values that are not finite: its weights are damaged, or its training diverged.",
                remedy="Export an earlier checkpoint: --checkpoint step_<N>.",
                reason="not_finite",
            )
        following = continued(loaded, module, prompt, stop_ids)
    return Expected(
        texts=texts,
        ids=ids,
        special_tokens=_special_tokens(loaded),
        stop_ids=stop_ids,
        conversation=_conversation(loaded),
        sequences=sequences,
        logits=logits,
        prompt=prompt,
        context_length=context_length,
        **following,
    )


@torch.no_grad()
def merged_logits_error(loaded: LoadedModel, expected: Expected) -> float:
    """How much the logits changed since they were expected, when the model had its adapters beside its weights."""
    with evaluating(loaded.module):
        merged = [last_logits(loaded, loaded.module, tokens) for tokens in expected.sequences]
    return logits_error(expected.logits, merged)


def _in_float32(module: nn.Module) -> nn.Module:
    """The module, or a copy if some of its weights have another data type: the export is computed in float32 too."""
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return module
    return copy.deepcopy(module).float()


def check_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts of many scripts, as far as the tokenizer can encode them, and one of its own vocabulary."""
    texts = []
    for text in _TEXTS:
        if not _can_encode(tokenizer, text):
            text = "".join(character for character in text if _can_encode(tokenizer, character))
        texts.append(text)
    step = max(1, tokenizer.vocab_size // 40)
    sample = [token for token in range(0, tokenizer.vocab_size, step) if token != tokenizer.end_of_text]
    texts.append(tokenizer.decode(sample))
    return texts


def _can_encode(tokenizer: Tokenizer, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except DataError:
        return False
    return True


def last_logits(loaded: LoadedModel, module: nn.Module, ids: list[int]) -> torch.Tensor:  # (positions, vocabulary)
    logits: torch.Tensor = module(torch.tensor([ids], device=loaded.device))  # (1, T, V)
    return logits[0, -POSITIONS:, : loaded.adapter.vocab_size].float().cpu()


def logits_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Root mean square of the differences, relative to that of the logits around their mean; infinite where the shapes
    differ."""
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return float("inf")
    ours_flat = torch.cat(ours)  # (positions, V)
    centered = ours_flat - ours_flat.mean(-1, keepdim=True)
    size = centered.square().mean().sqrt().clamp_min(1e-12)
    return float((torch.cat(theirs) - ours_flat).square().mean().sqrt() / size)


def continued(loaded: LoadedModel, module: nn.Module, prompt: list[int], stop_ids: Sequence[int]) -> dict[str, Any]:
    """Three fields of Expected: the tokens after the prompt, their text, and the logits they were chosen from."""
    count = max(1, min(NEW_TOKENS, loaded.adapter.context_length() - len(prompt)))
    continuation, choices = _continue(loaded, module, prompt, count, stop_ids)
    known = [token for token in continuation if token < loaded.tokenizer.vocab_size]
    return {"continuation": continuation, "continued_text": loaded.tokenizer.decode(known), "choices": choices}


def _continue(
    loaded: LoadedModel, module: nn.Module, prompt: list[int], count: int, stop_ids: Sequence[int]
) -> tuple[list[int], torch.Tensor]:
    """The most likely tokens after the prompt, and the logits they were chosen from."""
    next_logits = loaded.adapter.next_logits(module, loaded.adapter.context_length())
    ids = list(prompt)
    choices = []
    while len(ids) < len(prompt) + count:
        logits = next_logits(ids)[: loaded.adapter.vocab_size].float().cpu()
        choices.append(logits)
        ids.append(int(logits.argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :], torch.stack(choices)


def _stop_ids(loaded: LoadedModel) -> list[int]:
    """The tokens at which transformers must stop: those in the settings of its model, else the end of text."""
    if isinstance(loaded.module, CausalLM):
        return sorted(as_ids(loaded.module.base.generation_config.eos_token_id))
    return [] if loaded.tokenizer.end_of_text is None else [loaded.tokenizer.end_of_text]


def as_ids(eos: Any) -> set[int]:
    """eos_token_id of a config: a number, a list, or nothing."""
    ids = eos if isinstance(eos, list) else [eos]
    return {token for token in ids if isinstance(token, int)}


def _special_tokens(loaded: LoadedModel) -> dict[str, int | None]:
    if loaded.is_trained_from_scratch or loaded.tokenizer_dir is None:
        return {"eos_token_id": loaded.tokenizer.end_of_text}
    tokenizer = load_in_transformers(loaded.tokenizer_dir)
    return {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}


def _conversation(loaded: LoadedModel) -> str | None:
    if loaded.tokenizer_dir is None or not has_chat_template(loaded.tokenizer_dir):
        return None
    try:
        return ChatTemplate(loaded.tokenizer_dir).render(MESSAGES, add_generation_prompt=True)
    except BadRecord:  # a template for other roles
        return None
