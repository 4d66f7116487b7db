"""Byte-level BPE of the tokenizers library, which writes every byte as a printable character."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

# Bytes that stand for themselves, in Latin-1. The others are written as the characters from U+0100 on, in order.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted(set(range(0x100)) - set(_PRINTABLE))
_CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)}


def as_characters(data: bytes) -> str:
    """The bytes in the alphabet of byte-level BPE."""
    return "".join(map(_CHARACTERS.__getitem__, data))


def byte_level_tokenizer(
    vocabulary: Mapping[str, int], merges: list[tuple[str, str]], end_of_text: str, splits_words: bool
) -> Any:
    """A tokenizers.Tokenizer; `splits_words` as GPT-2 does, else merges may cross words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end_of_text, special=True, normalized=False)])
    return tokenizer


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """The merges of a BPE whose token ids are in the order of its merges, as tiktoken's are."""
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = _last_merge(token, rank, ranks)
            merges.append((as_characters(left), as_characters(right)))
    return merges


def _last_merge(token: bytes, rank: int, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that were merged into this one."""
    cuts = [i for i in range(1, len(token)) if ranks.get(token[:i], rank) < rank and ranks.get(token[i:], rank) < rank]
    if len(cuts) == 1:  # most tokens
        return token[: cuts[0]], token[cuts[0] :]
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]
