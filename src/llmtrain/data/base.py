"""What the trainer asks of data, and what most datasets need to say: where their text comes from.

A dataset is a class with two methods, `identity` and `pieces`; tokenising, caching, shuffling and batching are
done here for all of them. Add a row to registry.DATA and it can be named in a config.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llmtrain.config.schema import DataSection
from llmtrain.data.token_store import TokenStore, open_or_build
from llmtrain.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_identity

Split = Literal["train", "val"]


class Piece(NamedTuple):
    """Some text, and whether a document ends with it (long documents come in several pieces)."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data: what the trainer reads batches from."""

    tokenizer: Tokenizer
    train: TokenStore
    val: TokenStore
    fingerprint: str
    """SHA-256 over all tokens: two machines with the same one train on the same data."""


class DataModule(ABC):
    def __init__(self, config: DataSection, seed: int) -> None:
        self.config = config
        self.seed = seed

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the text: names, sizes, versions. Cheap, for it is asked at every start."""

    @abstractmethod
    def pieces(self, split: Split) -> Iterator[Piece]:
        """The text of a split, in order."""

    def _texts(self) -> Iterator[str]:
        """Everything: a character that only the validation text has must have an id too."""
        splits: tuple[Split, Split] = ("train", "val")
        return (piece.text for split in splits for piece in self.pieces(split))

    def prepare(self, threads: int) -> PreparedData:
        """Open the tokenised data, making it first where it is not there yet."""
        folder = open_or_build(
            Path(self.config.cache_dir).expanduser(),
            identity={"source": self.identity(), "tokenizer": tokenizer_identity(self.config.tokenizer)},
            tokenizer=lambda: load_tokenizer(self.config.tokenizer, self._texts()),
            pieces=self.pieces,
            threads=threads,
        )
        return PreparedData(folder.tokenizer(), folder.open("train"), folder.open("val"), folder.fingerprint)
