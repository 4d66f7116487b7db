"""How a row is written as text: as a conversation by the tokenizer's own template, or as headed paragraphs."""

from pathlib import Path
from typing import Literal

from llmtrain.config.data import ChatJsonlSection, DataSection, InstructJsonlSection
from llmtrain.data.examples.chat_template import ChatTemplate, Message, has_chat_template
from llmtrain.data.examples.example import BadExample, Segment
from llmtrain.data.tokenizers.tokenizer import Tokenizer
from llmtrain.errors import DataError, UsageError

__all__ = ["choose_format", "conversation", "has_chat_template", "plain_prompt", "prompt_prefix", "prompt_text"]


def choose_format(config: DataSection, folder: Path | None) -> Literal["chat", "plain"]:
    """What `auto` means for this tokenizer directory (None: a built-in tokenizer, which has no template)."""
    wanted = "chat" if isinstance(config, ChatJsonlSection) else getattr(config, "prompt_format", "auto")
    if wanted == "plain":
        return "plain"
    if has_chat_template(folder):
        return "chat"
    if wanted == "auto":
        return "plain"
    what = "data.name is chat_jsonl" if config.name == "chat_jsonl" else "data.prompt_format is chat"
    raise UsageError(
        f"{what}, but the tokenizer {folder or config.tokenizer or 'byte'} has no chat template.",
        remedy="Set data.tokenizer to a directory with a chat_template.jinja"
        + ("." if config.name == "chat_jsonl" else ", or data.prompt_format to plain."),
    )


def conversation(template: ChatTemplate, messages: list[Message]) -> list[Segment]:
    """Prompts and answers in turn. Each answer is what the template adds to the prompt it was asked with, so that
    training and inference see the same text. What follows the last answer is left out: nothing is learned from it."""
    segments: list[Segment] = []
    written = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:index], for_answer=True)
        whole = template.render(messages[: index + 1], for_answer=False)
        if not prompt.startswith(written) or not whole.startswith(prompt):
            raise BadExample(
                f"the chat template rewrites earlier turns when message {index + 1} is added, "
                "so what the model would have seen cannot be told",
                "Use rows with one answer each, or another template.",
            )
        segments += [Segment(prompt[len(written) :], False), Segment(whole[len(prompt) :], True)]
        written = whole
    return segments


def plain_prompt(instruction: str, text: str = "") -> str:
    middle = f"### Input:\n{text}\n\n" if text else ""
    return f"### Instruction:\n{instruction}\n\n{middle}### Response:\n"


def prompt_text(config: DataSection, tokenizer_dir: Path | None, messages: list[Message]) -> str:
    """A conversation as the model was trained to answer it, ready for generation."""
    if choose_format(config, tokenizer_dir) == "plain":
        return "".join(map(_plain_turn, messages))
    assert tokenizer_dir
    try:
        return ChatTemplate(tokenizer_dir).render(messages, for_answer=True)
    except BadExample as problem:
        raise DataError(f"No prompt can be made: {problem.reason}.", remedy=problem.remedy) from None


def prompt_prefix(config: DataSection, tokenizer_dir: Path | None, tokenizer: Tokenizer) -> list[int]:
    """Ids in front of such a prompt, as in the training rows. A chat template writes its own."""
    is_plain = choose_format(config, tokenizer_dir) == "plain"
    return tokenizer.prefix_ids() if is_plain and adds_special_tokens(config) else []


def adds_special_tokens(config: DataSection) -> bool:
    return not isinstance(config, InstructJsonlSection) or config.add_special_tokens


def _plain_turn(message: Message) -> str:
    content = str(message["content"])
    return plain_prompt(content) if message["role"] == "user" else f"{content}\n\n"
