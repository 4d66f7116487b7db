"""How an example is written as text: by the tokenizer's chat template, or as headed paragraphs."""

from pathlib import Path
from typing import Literal

from llmtrain.config.data import ChatJsonlSection, DataSection, InstructJsonlSection
from llmtrain.config.mixture import data_sections
from llmtrain.data.records.base import BadRecord
from llmtrain.data.text_and_examples import Segment
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.chat_template import ChatTemplate, Message, has_chat_template
from llmtrain.errors import DataError, UsageError

__all__ = [
    "choose_format",
    "conversation",
    "has_chat_template",
    "plain_conversation",
    "plain_prompt",
    "prompt_prefix",
    "prompt_text",
]


def choose_format(config: DataSection, tokenizer_dir: Path | None) -> Literal["chat", "plain"]:
    """Resolve `auto` for a tokenizer directory (None: a built-in tokenizer, which has no chat template). For a mixture,
    in the format of its first source."""
    config = data_sections(config)[0]
    requested = "chat" if isinstance(config, ChatJsonlSection) else getattr(config, "prompt_format", "auto")
    if requested == "plain":
        return "plain"
    if has_chat_template(tokenizer_dir):
        return "chat"
    if requested == "auto":
        return "plain"
    what = "data.prompt_format is chat"
    remedy = "Set data.tokenizer to a directory with a chat_template.jinja, or data.prompt_format to plain."
    if config.name == "chat_jsonl":
        what = "data.name is chat_jsonl"
        remedy = "Set data.tokenizer to a directory with a chat_template.jinja."
    tokenizer = tokenizer_dir or config.tokenizer or "byte"
    raise UsageError(f"{what}, but the tokenizer {tokenizer} has no chat template.", remedy=remedy)


def conversation(template: ChatTemplate, messages: list[Message]) -> list[Segment]:
    """Prompts and answers in turn.

    Each answer is what the template adds to the prompt that precedes it, so that training and inference use the same
    text. Messages after the last answer are dropped: they carry no loss.
    """
    segments: list[Segment] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:index], add_generation_prompt=True)
        full = template.render(messages[: index + 1], add_generation_prompt=False)
        if not prompt.startswith(text) or not full.startswith(prompt):
            raise BadRecord(
                f"the chat template rewrites earlier turns when message {index + 1} is added, "
                "so the prompt of each answer is ambiguous",
                "Use examples with one answer each, or another chat template.",
            )
        segments += [Segment(prompt[len(text) :], False), Segment(full[len(prompt) :], True)]
        text = full
    return segments


def plain_prompt(instruction: str, context: str = "") -> str:
    middle = f"### Input:\n{context}\n\n" if context else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def prompt_text(config: DataSection, tokenizer_dir: Path | None, messages: list[Message]) -> str:
    """A conversation in the format the model was trained on, ready for generation."""
    if choose_format(config, tokenizer_dir) == "plain":
        return plain_conversation(messages)
    assert tokenizer_dir
    try:
        return ChatTemplate(tokenizer_dir).render(messages, add_generation_prompt=True)
    except BadRecord as problem:
        raise DataError(f"Cannot build the prompt: {problem.reason}.", remedy=problem.remedy) from None


def prompt_prefix(config: DataSection, tokenizer_dir: Path | None, tokenizer: Tokenizer) -> list[int]:
    """Ids before such a prompt, as in training. A chat template writes its own."""
    is_plain = choose_format(config, tokenizer_dir) == "plain"
    if is_plain and adds_special_tokens(config):
        return tokenizer.prefix_ids()
    return []


def adds_special_tokens(config: DataSection) -> bool:
    section = data_sections(config)[0]
    return not isinstance(section, InstructJsonlSection) or section.add_special_tokens


def plain_conversation(messages: list[Message]) -> str:
    """A conversation as paragraphs with headings, up to where the next answer begins."""
    return "".join(map(_plain_turn, messages))


def _plain_turn(message: Message) -> str:
    content = str(message["content"])
    if message["role"] == "user":
        return plain_prompt(content)
    return f"{content}\n\n"
