"""Statistics of tokenized data: lengths, what the context cuts off, exact duplicates.

Counting reads all tokens, so the result is kept in <cache_dir>/statistics: a run records it if it is there already.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.core.files import read_json, write_json
from llmtrain.core.logs import log
from llmtrain.data.base import PreparedData
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.store.example_store import ExampleStore

Values = dict[str, Any]
Spans = npt.NDArray[np.int64]
"""(documents or examples, 2): start and end in the tokens."""
FORMAT_VERSION = 1
QUANTILES = {"shortest": 0.0, "median": 0.5, "long": 0.95, "longest": 1.0}


@dataclass(frozen=True)
class StatisticsFile:
    """Where the statistics of some data are kept."""

    path: Path

    @classmethod
    def of(cls, cache_dir: Path, data_fingerprint: str, tokenizer_sha256: str, block_size: int) -> "StatisticsFile":
        identity = f"{FORMAT_VERSION} {data_fingerprint} {tokenizer_sha256} {block_size}"
        return cls(cache_dir / "statistics" / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json")

    def read(self, labels: Sequence[str]) -> list[Values] | None:
        """One row per source; None if they are not known. The sources may have had other labels."""
        rows = read_json(self.path)
        if not isinstance(rows, list) or len(rows) != len(labels) or not all(isinstance(row, dict) for row in rows):
            return None
        return [{**row, "source": label} for row, label in zip(rows, labels, strict=True)]

    def write(self, rows: list[Values]) -> None:
        """Best effort: without the file they are counted again."""
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, rows)


def statistics(sources: list[tuple[str, PreparedData]], end_of_text: int | None, block_size: int) -> list[Values]:
    """One row per source. Duplicates are counted in all sources together: a document that an earlier source has is a
    duplicate too."""
    seen: set[bytes] = set()
    rows = []
    for label, prepared in sources:
        store = prepared.train
        if isinstance(store, ExampleStore):
            spans = store.spans[:, :2]
            unit = "examples"
        elif isinstance(store, PairStore):
            spans = store.answers.spans[:, :2]
            unit = "answers"
        else:
            spans = _spans(store.tokens, end_of_text)
            unit = "documents"
        lengths = spans[:, 1] - spans[:, 0]
        duplicates, duplicate_tokens = _duplicates(label, store.tokens, spans, seen)
        # A sequence holds block_size tokens and one more, the last target.
        too_long = lengths > block_size + 1
        row: Values = {
            "source": label,
            "unit": unit,
            "count": len(lengths),
            "tokens": int(lengths.sum()),
            "block_size": block_size,
            "lengths": {name: int(np.quantile(lengths, at)) for name, at in QUANTILES.items()} if len(lengths) else {},
            "histogram": _histogram(lengths),
            "longer_than_context": float(too_long.mean()) if len(lengths) else 0.0,
            "tokens_cut_off": None,
            "duplicates": duplicates,
            "duplicate_tokens": duplicate_tokens,
        }
        if unit != "documents":  # running text goes on in the next window
            cut = np.maximum(lengths - block_size - 1, 0).sum()
            row["tokens_cut_off"] = float(cut / max(1, lengths.sum()))
        rows.append(row)
    return rows


def _spans(tokens: npt.NDArray[Any], end_of_text: int | None) -> Spans:
    """The documents of running text, each up to its end-of-text token; without such a token, all of it is one."""
    if end_of_text is None:
        return np.array([[0, len(tokens)]])
    ends = np.flatnonzero(tokens == end_of_text) + 1
    if not len(ends) or ends[-1] < len(tokens):
        ends = np.append(ends, len(tokens))
    return np.column_stack([np.concatenate([[0], ends[:-1]]), ends])


def _duplicates(label: str, tokens: npt.NDArray[Any], spans: Spans, seen: set[bytes]) -> tuple[int, int]:
    """Number of documents that are equal to an earlier one, and their tokens."""
    count = token_count = 0
    for number, (start, end) in enumerate(_pairs(spans)):
        digest = hashlib.blake2b(tokens[start:end].tobytes(), digest_size=16).digest()
        if digest in seen:
            count += 1
            token_count += end - start
        seen.add(digest)
        if number and not number % 1_000_000:
            log("DATA", f"{label}: {number:,} of {len(spans):,} compared")
    return count, token_count


def _pairs(spans: Spans) -> Iterator[tuple[int, int]]:
    """In groups, so that Python's integers of all documents are not in memory at once."""
    for first in range(0, len(spans), 1 << 16):
        yield from map(tuple, spans[first : first + (1 << 16)].tolist())


def _histogram(lengths: Spans) -> list[Values]:
    """Number of documents with fewer tokens than each power of two, and not fewer than the one before."""
    if not len(lengths):
        return []
    exponents = np.frexp(lengths.astype(np.float64))[1]  # 2 ** (exponent - 1) <= length < 2 ** exponent
    counts = np.bincount(exponents)
    first = int(exponents.min())
    return [
        {"from": 1 << (each - 1) if each else 0, "below": 1 << each, "count": int(counts[each])}
        for each in range(first, len(counts))
    ]
