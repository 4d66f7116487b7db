"""A Hugging Face tokenizer directory, by the tokenizers library."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.core.files import read_json, write_json
from llmtrain.data.tokenizers.base import TOKENIZER_CONFIG, TOKENIZER_FILE, Ids, TokenBytes, Tokenizer
from llmtrain.data.tokenizers.split import split_words
from llmtrain.errors import DataError

_WORD_CACHE_SIZE = 1_000_000
# Without these, transformers would open a saved directory with another chat template or other special tokens.
_EXTRA_FILES = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class HFTokenizer(Tokenizer):
    """tokenizer.json, or vocab.json with merges.txt."""

    kind = "hf"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = _read(directory)
        # The file may contain the truncation and padding settings of the model it was saved with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Ids may have gaps, so the highest one determines the size.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_text = self._find_end_of_text()
        self._word_cache: dict[str, bytes] = {}
        self._can_split_words = _can_split_words(json.loads(self._tokenizer.to_str()))

    def _find_end_of_text(self) -> int | None:
        eos_token = (read_json(self._directory / TOKENIZER_CONFIG) or {}).get("eos_token")
        if isinstance(eos_token, dict):
            eos_token = eos_token.get("content")
        names = [eos_token, *_END_OF_TEXT_NAMES] if eos_token else _END_OF_TEXT_NAMES
        for name in names:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return int(token)
        return None

    @property
    def start_of_text(self) -> int | None:
        for name in (TOKENIZER_CONFIG, "special_tokens_map.json"):
            token = (read_json(self._directory / name) or {}).get("bos_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str) and (found := self._tokenizer.token_to_id(token)) is not None:
                return int(found)
        return self.end_of_text

    def encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_many(self, texts: Sequence[str], threads: int) -> Iterator[Ids]:  # noqa: ARG002 (it uses all cores)
        if self._can_split_words:
            yield from map(self._encode_words, texts)
        else:
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def _encode_words(self, text: str) -> Ids:
        """Same ids as encode, several times faster: most words are in the cache."""
        words = split_words(text)
        if len(self._word_cache) > _WORD_CACHE_SIZE:
            self._word_cache = {}
        new = [word for word in dict.fromkeys(words) if word not in self._word_cache]
        for word, encoding in zip(new, self._tokenizer.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._word_cache[word] = np.array(encoding.ids, dtype=np.uint32).tobytes()
        return np.frombuffer(b"".join(map(self._word_cache.__getitem__, words)), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_bytes(self) -> TokenBytes | None:
        layout = json.loads(self._tokenizer.to_str())
        if layout["normalizer"] is not None or not _is_byte_level(layout):
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token)  # a byte-level token has one character per byte
        for added in layout["added_tokens"]:
            lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
        return lengths

    def prefix_ids(self) -> list[int]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        with_special = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(with_special)) if with_special[i : i + len(plain)] == plain)
        return list(with_special[: next(starts, 0)])

    def save(self, directory: Path) -> None:
        super().save(directory)
        self._tokenizer.save(str(directory / TOKENIZER_FILE))
        tokenizer_config = read_json(self._directory / TOKENIZER_CONFIG)
        if tokenizer_config:
            write_json(directory / TOKENIZER_CONFIG, tokenizer_config)
        for name in _EXTRA_FILES:
            if (self._directory / name).is_file() and directory.resolve() != self._directory.resolve():
                shutil.copyfile(self._directory / name, directory / name)

    def _to_tokenizers(self) -> Any:
        """Without what it adds around a text (BOS): `encode` does not add it, so the model has not seen it."""
        layout = json.loads(self._tokenizer.to_str())
        return type(self._tokenizer).from_str(json.dumps({**layout, "post_processor": None}))

    def _vocabulary(self) -> dict[str, int]:
        # Not a hash of tokenizer.json: its formatting depends on the version of the library.
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))


def _read(directory: Path) -> Any:
    import tokenizers

    try:
        if (directory / TOKENIZER_FILE).is_file():
            return tokenizers.Tokenizer.from_file(str(directory / TOKENIZER_FILE))
        if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
            bpe = tokenizers.ByteLevelBPETokenizer(str(directory / "vocab.json"), str(directory / "merges.txt"))
            return tokenizers.Tokenizer.from_str(bpe.to_str())
    except Exception as problem:  # the library raises plain Exception
        raise DataError(f"Cannot read the tokenizer in {directory}: {problem}.") from None
    raise DataError(
        f"{directory} has no tokenizer.json (nor vocab.json with merges.txt).",
        remedy="Use a directory written by save_pretrained of a fast tokenizer.",
    )


def _is_byte_level(layout: dict[str, Any]) -> bool:
    return '"ByteLevel"' in json.dumps(layout["pre_tokenizer"])


def _can_split_words(layout: dict[str, Any]) -> bool:
    """Whether encoding word by word gives the same ids as encoding the whole text."""
    return (
        layout["normalizer"] is None
        and _is_byte_level(layout)
        # Such a token matches across the space at which text is split.
        and not any(token["rstrip"] or " " in token["content"] for token in layout["added_tokens"])
    )
