"""The chat template of a tokenizer directory: how a conversation is written for the model."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmtrain.data.types import BadExample
from llmtrain.errors import DataError, UsageError
from llmtrain.files import read_json
from llmtrain.logs import warn

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
# Besides tokenizer.json: what decides how a conversation is written and which ids begin and end a text.
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
# Llama's templates write today's date unless they are given one. The same rows must give the same tokens on any day,
# so it is always the one that these templates fall back to.
DATE = "26 Jul 2024"


def has_chat_template(folder: Path | None) -> bool:
    if folder is None:
        return False
    settings = read_json(folder / "tokenizer_config.json")
    return (folder / "chat_template.jinja").is_file() or (
        isinstance(settings, dict) and bool(settings.get("chat_template"))
    )


def template_identity(folder: Path | None) -> str | None:
    """What decides the text of a conversation, and the special tokens around it."""
    if folder is None:
        return None
    digest = hashlib.sha256()
    for name in TEMPLATE_FILES:
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


class ChatTemplate:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = _load(folder, template_identity(folder))

    def render(self, messages: list[Message], for_answer: bool) -> str:
        """The conversation as text; `for_answer`: up to where the assistant begins to speak."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=for_answer, date_string=DATE
                )
            )
        except Exception as problem:  # a template is a program: it may raise anything
            raise BadExample(f"the chat template refuses the conversation: {_one_line(problem)}") from None


@lru_cache(maxsize=2)
def _load(folder: Path, identity: str | None) -> Any:  # noqa: ARG001 (a template that was changed is read again)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(
            "A chat template needs transformers, which is not installed.", remedy="pip install 'llmtrain[hf]'"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as problem:
        raise DataError(
            f"The tokenizer in {folder} cannot be opened by transformers: {_one_line(problem)}.",
            remedy="Name a directory that save_pretrained of a tokenizer wrote.",
        ) from None
    template = str(tokenizer.chat_template)
    if "strftime_now" in template and "date_string" not in template:
        warn("DATA", f"the chat template in {folder} writes today's date: on another day the same rows differ")
    return tokenizer


def _one_line(problem: Exception) -> str:
    return (" ".join(str(problem).split()) or type(problem).__name__)[:300].rstrip(".")
