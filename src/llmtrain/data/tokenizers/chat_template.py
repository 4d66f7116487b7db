"""The chat template of a tokenizer directory: how a conversation is written as text."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmtrain.core.files import read_json
from llmtrain.core.install import install_command
from llmtrain.core.logs import warn
from llmtrain.core.text import one_line
from llmtrain.data.records.base import BadRecord
from llmtrain.errors import DataError, UsageError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
# Files that, with tokenizer.json, determine the text of a conversation and its special tokens.
TEMPLATE_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
# Llama's templates insert today's date unless one is passed. The same examples must give the same tokens on any day,
# so pass the date that these templates use as their default.
DATE = "26 Jul 2024"


def has_chat_template(tokenizer_dir: Path | None) -> bool:
    if tokenizer_dir is None:
        return False
    tokenizer_config = read_json(tokenizer_dir / "tokenizer_config.json")
    return (tokenizer_dir / "chat_template.jinja").is_file() or (
        isinstance(tokenizer_config, dict) and bool(tokenizer_config.get("chat_template"))
    )


def template_identity(tokenizer_dir: Path | None) -> str | None:
    """Hash of what determines the text of a conversation and its special tokens; None for a built-in tokenizer."""
    if tokenizer_dir is None:
        return None
    digest = hashlib.sha256()
    for name in TEMPLATE_FILES:
        path = tokenizer_dir / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


class ChatTemplate:
    def __init__(self, tokenizer_dir: Path) -> None:
        self._tokenizer = load_in_transformers(tokenizer_dir)

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        continues: bool = False,
        tools: list[Any] | None = None,
    ) -> str:
        """The conversation as text; with add_generation_prompt, up to where the next answer begins. `continues`: up to
        the end of the last message, which is continued. `tools`: what the model may call, described by the template."""
        options: dict[str, Any] = {"date_string": DATE}
        if tools:
            options["tools"] = tools
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continues,
                    **options,
                )
            )
        except Exception as problem:  # a template is code and can raise anything
            raise BadRecord(f"the chat template rejects the conversation: {_one_line(problem)}") from None


def load_in_transformers(tokenizer_dir: Path) -> Any:
    """The tokenizer as transformers opens the directory."""
    return _load(tokenizer_dir, template_identity(tokenizer_dir))


@lru_cache(maxsize=2)
def _load(tokenizer_dir: Path, identity: str | None) -> Any:  # noqa: ARG001 (a changed template is loaded again)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(
            "A chat template requires transformers, which is not installed.", remedy=install_command("hf")
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True, trust_remote_code=False)
    except Exception as problem:
        raise DataError(
            f"transformers cannot load the tokenizer in {tokenizer_dir}: {_one_line(problem)}.",
            remedy="Use a directory written by save_pretrained of a tokenizer.",
        ) from None
    template = str(tokenizer.chat_template)
    if "strftime_now" in template and "date_string" not in template:
        warn("DATA", f"the chat template in {tokenizer_dir} inserts today's date: tokens will differ on another day")
    return tokenizer


def _one_line(problem: Exception) -> str:
    return (one_line(problem) or type(problem).__name__)[:300].rstrip(".")
