"""A tokenizer as GGUF has it: byte-level BPE only, split before the merges in a way that llama.cpp has a name for.

llama.cpp does not read the regular expressions of a tokenizer: `tokenizer.ggml.pre` names one of those it has built in.
With the wrong name a model loads, and gets other tokens than it was trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.core.files import read_json
from llmtrain.data.tokenizers.base import TOKENIZER_CONFIG, TOKENIZER_FILE

Layout = Mapping[str, Any]
"""tokenizer.json"""
Splits = tuple[tuple[object, ...], ...]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
_GPT2_WORDS = ("ByteLevel", True)  # with GPT-2's regular expression
_BYTES = ("ByteLevel", False)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = ("Split", _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST)
_QWEN2_WORDS = ("Split", _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST)
# What splits text before the merges -> tokenizer.ggml.pre, and whether words of the vocabulary skip the merges.
PRE_TOKENIZERS: dict[Splits, tuple[str, bool]] = {
    (_GPT2_WORDS,): ("gpt-2", False),
    (("Digits", True), _GPT2_WORDS): ("smollm", False),
    (_LLAMA3_WORDS, _BYTES): ("llama-bpe", True),
    (_QWEN2_WORDS, _BYTES): ("qwen2", False),
}
READ_BY_LLAMA_CPP_ONLY = ("smollm",)
"""Names that transformers ignores when it reads a GGUF file: it gives other ids to digits."""
_NEVER = ("ÿ", "þ")
"""The bytes 255 and 254, which are not in any UTF-8 text."""
_NAMED = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class Vocabulary:
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    special: dict[str, int]
    """bos, eos, pad and unk, as far as there are such tokens -> id."""
    adds_bos: bool
    chat_template: str | None


def vocabulary_problem(layout: Layout) -> str | None:
    """Why llama.cpp cannot read this tokenizer exactly; None if it can."""
    model = layout["model"]
    if model.get("type") != "BPE" or not _splits(layout)[-1:] or _splits(layout)[-1][0] != "ByteLevel":
        return f"its tokenizer is not byte-level BPE ({model.get('type')})"
    if pre_tokenizer(layout) is None:
        return "its tokenizer splits text in a way that llama.cpp has no name for"
    for token in layout["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or token["single_word"]:
            return f"its token {token['content']} matches the space around it"
    return None


def _splits(layout: Layout) -> Splits:
    first = layout.get("pre_tokenizer") or {}
    parts = first["pretokenizers"] if first.get("type") == "Sequence" else [first]
    return tuple(_split(part) for part in parts)


def _split(part: Layout) -> tuple[object, ...]:
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return kind, part.get("use_regex", True)
    if kind == "Digits":
        return kind, part.get("individual_digits")
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return kind, part.get("pattern", {}).get("Regex")
    return kind, part


def pre_tokenizer(layout: Layout) -> str | None:
    """tokenizer.ggml.pre; None if llama.cpp has no name for what the tokenizer does."""
    splits = _splits(layout)
    if not layout["model"]["merges"]:  # no merges, so that it does not matter where text is split
        splits = (_GPT2_WORDS,)
    # Not a dictionary's `get`: an unknown part is not hashable.
    for known, (name, skips_merges) in PRE_TOKENIZERS.items():
        # llama.cpp does not normalize. Nearly all text is in NFC already, and then gets the same tokens.
        allowed = ({"type": "NFC"}, None) if name == "qwen2" else (None,)
        is_same = bool(layout["model"].get("ignore_merges")) == skips_merges and layout.get("normalizer") in allowed
        if splits == known and is_same:
            return name
    return None


def read_vocabulary(folder: Path, size: int, adds_bos: bool) -> Vocabulary:
    """From the tokenizer files of an export; `size`: rows of the embedding, of which the last may have no token."""
    layout = read_json(folder / TOKENIZER_FILE)
    pre = pre_tokenizer(layout)
    assert pre is not None  # vocabulary_problem was asked
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [UNUSED] * size
    for token, index in layout["model"]["vocab"].items():
        tokens[index] = token
        types[index] = NORMAL
    for added in layout["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    values = read_json(folder / TOKENIZER_CONFIG) or {}
    special = _special_ids(values, tokens)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in layout["model"]["merges"]]
    if not merges:  # llama.cpp requires one; the end of text, which no text has either, is its result
        end = special["eos"]
        tokens[end] = "".join(_NEVER)
        types[end] = NORMAL
        merges = [" ".join(_NEVER)]
    return Vocabulary(pre, tokens, types, merges, special, adds_bos, _chat_template(folder, values))


def _special_ids(values: Mapping[str, Any], tokens: list[str]) -> dict[str, int]:
    special = {}
    for name in _NAMED:
        token = values.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token in tokens:
            special[name] = tokens.index(token)
    return special


def _chat_template(folder: Path, values: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = values.get("chat_template")
    return template if isinstance(template, str) else None
