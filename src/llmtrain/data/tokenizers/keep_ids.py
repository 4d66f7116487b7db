"""A tokenizer must give the same ids in transformers as it gave in training."""

from pathlib import Path

from llmtrain.core.files import read_json, write_json
from llmtrain.core.logs import warn
from llmtrain.data.tokenizers.base import GENERIC_CLASS, TOKENIZER_CONFIG, Tokenizer
from llmtrain.data.tokenizers.chat_template import load_in_transformers
from llmtrain.errors import LlmtrainError

_TEXTS = ("In 2026, 12:30 isn't 1,234.56%.", "  two  spaces\tand a tab\r\n\n\nend ", "Größe Ελληνικά 東京 हिन्दी 🙂")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token")


def keep_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """Let transformers take tokenizer.json of a saved tokenizer as it is, if the class that is named beside it rebuilds
    it in another way. GPT2Tokenizer, for example, ignores that SmolLM's splits numbers into digits."""
    try:
        theirs = load_in_transformers(folder)
    except LlmtrainError:  # the check of the export reports it
        return
    if all(theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text).tolist() for text in _TEXTS):
        return
    values = read_json(folder / TOKENIZER_CONFIG) or {}
    for token in _SPECIAL_TOKENS:
        if getattr(theirs, token) is not None:
            values[token] = getattr(theirs, token)
    write_json(folder / TOKENIZER_CONFIG, {**values, "tokenizer_class": GENERIC_CLASS})
    warn(
        "SAVE",
        f"{type(theirs).__name__} of transformers gives other token ids than tokenizer.json, with which the model was "
        f"trained; the export names {GENERIC_CLASS}, which takes tokenizer.json as it is",
    )
