"""The model that tasks are scored with: in memory, on one process or several, and its text as tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llmtrain.config.data import DataSection
from llmtrain.config.model import HfCausalLmSection
from llmtrain.config.schema import EXAMPLE_DATA
from llmtrain.data.records.base import BadRecord
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.chat_template import ChatTemplate, has_chat_template
from llmtrain.distributed.world import World
from llmtrain.errors import DataError, UsageError
from llmtrain.models.base import ModelAdapter
from llmtrain.models.device_precision import Autocast

OnProgress = Callable[[str, int, int | None], None]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class TaskModel:
    """Every rank calls the same functions with the same requests, and gets the same results."""

    adapter: ModelAdapter
    module: nn.Module
    autocast: Autocast
    tokenizer: Tokenizer
    world: World
    is_sharded: bool = False
    """Then every rank is needed in every forward pass."""
    template: ChatTemplate | None = None
    """None: text is scored as it is."""
    batch_size: int = 8
    """Sequences per forward pass."""
    seed: int = 0
    stop: Callable[[], bool] = lambda: False
    """Whether to stop. All ranks call it together."""
    on_progress: OnProgress = lambda what, done, total: None  # noqa: ARG005
    _contexts: dict[str, list[int]] = field(default_factory=dict)
    can_share: list[bool] = field(default_factory=list)
    """Whether common beginnings are computed once; empty until likelihoods.py has found out."""

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def max_length(self) -> int:
        """Most tokens that the model reads."""
        return self.adapter.max_positions or self.adapter.context_length()

    @property
    def start_token(self) -> int:
        """What a text without a context follows."""
        start = self.tokenizer.start_of_text
        if start is None:  # a char tokenizer
            line_break = encode_or_none(self.tokenizer, "\n")
            start = line_break[0] if line_break else 0
        return start

    def encode(self, text: str, adds_prefix: bool = True) -> list[int]:
        """Token ids of a text, after those that the tokenizer of a Hugging Face model puts before it (BOS). A text that
        begins with BOS, as one of a chat template does, gets no second one."""
        ids = [int(token) for token in self.tokenizer.encode(text)]
        if not adds_prefix or not isinstance(self.adapter.config, HfCausalLmSection):
            return ids  # our own models have been trained without
        if text.startswith(self.tokenizer.decode([self.start_token])):
            return ids
        return [*self.tokenizer.prefix_ids(), *ids]

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a text in two parts. They are encoded together, because a token may span the border; spaces at
        the end of the context belong to the continuation, as tokenizers join them with the next word."""
        stripped = context.rstrip()
        if stripped != context:
            continuation = context[len(stripped) :] + continuation
            context = stripped
        if not context:
            ids = self.encode(continuation, adds_prefix=False)
            if ids and ids[0] == self.start_token:
                return ids[:1], ids[1:]
            return [self.start_token], ids
        if context not in self._contexts:
            self._contexts.clear()  # the choices of an item follow each other
            self._contexts[context] = self.encode(context)
        before = self._contexts[context]
        return before, self.encode(context + continuation)[len(before) :]

    def chat(self, messages: Messages, continues: bool = False) -> str:
        """A conversation as text, up to where the next answer begins; `continues`: up to the end of the last message,
        which the answer continues."""
        assert self.template is not None
        try:
            return self.template.render(messages, add_generation_prompt=not continues, continues=continues)
        except BadRecord as problem:
            if messages[0]["role"] == "system":  # some templates accept no system message
                return self.chat(messages[1:], continues)
            raise DataError(f"A task cannot be written as a conversation: {problem.reason}.") from None


def encode_or_none(tokenizer: Tokenizer, text: str) -> Sequence[int] | None:
    try:
        return [int(token) for token in tokenizer.encode(text)]
    except DataError:  # characters that a char tokenizer does not know
        return None


def chat_template(
    data: DataSection, tokenizer_dir: Path | None, is_run: bool, requested: bool | None
) -> ChatTemplate | None:
    """The chat template to score with. Unless `requested` says otherwise, that of a model that answers: one trained on
    conversations, or a model directory that has a template."""
    has_template = tokenizer_dir is not None and has_chat_template(tokenizer_dir)
    if requested is None:
        is_plain = getattr(data, "prompt_format", "auto") == "plain" or data.name not in EXAMPLE_DATA
        requested = has_template and not (is_run and is_plain)
    if not requested:
        return None
    check_has_template(tokenizer_dir)
    assert tokenizer_dir is not None
    return ChatTemplate(tokenizer_dir)


def check_has_template(tokenizer_dir: Path | None) -> None:
    if tokenizer_dir is None or not has_chat_template(tokenizer_dir):
        raise UsageError("--chat-template: the tokenizer of this model has no chat template.", remedy="Leave it out.")
