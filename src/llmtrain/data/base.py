"""What the trainer asks of data, and what most datasets need to say: where their text comes from.

    DataModule          prepare() -> PreparedData
    ├── TextData        endless text: `identity` and `chunks`
    └── ExampleData         rows with an answer each: `identity` and `rows` (rows.py)

Tokenising, caching, shuffling and batching are done for all of them. Add a row to registry.DATA and a dataset can be
named in a config.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.config.data import DataSection
from llmtrain.data.store.directory import SPLITS, Split, open_or_build
from llmtrain.data.store.example_store import ExampleStore
from llmtrain.data.store.token_store import TokenStore, text_writer
from llmtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, tokenizer_identity

__all__ = ["DataModule", "PreparedData", "Split", "TextChunk", "TextData"]


class TextChunk(NamedTuple):
    """Some text, and whether a document ends with it (long documents come in several chunks)."""

    text: str
    ends_document: bool


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data: what the trainer reads batches from."""

    tokenizer: Tokenizer
    train: TokenStore | ExampleStore
    val: TokenStore | ExampleStore
    fingerprint: str
    """SHA-256 over all tokens: two machines with the same one train on the same data."""


class DataModule(ABC):
    def __init__(self, config: DataSection, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.tokenizer_spec = config.tokenizer or "byte"
        self.cache_dir = Path(config.cache_dir).expanduser()

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What decides the data: names, sizes, versions. Cheap, for it is asked at every start."""

    @abstractmethod
    def prepare(self, threads: int) -> PreparedData:
        """Open the tokenised data, making it first where it is not there yet."""


class TextData(DataModule):
    """Text without end: a sample is any window of it."""

    @abstractmethod
    def chunks(self, split: Split) -> Iterator[TextChunk]:
        """The text of a split, in order."""

    def _texts(self) -> Iterator[str]:
        """Everything: a character that only the validation text has must have an id too."""
        return (piece.text for split in SPLITS for piece in self.chunks(split))

    def prepare(self, threads: int) -> PreparedData:
        folder = open_or_build(
            self.cache_dir,
            identity={"source": self.identity(), "tokenizer": tokenizer_identity(self.tokenizer_spec)},
            tokenizer=lambda: load_tokenizer(self.tokenizer_spec, self._texts()),
            write=text_writer(self.chunks, threads),
        )
        train, val = (TokenStore.open(folder, split) for split in SPLITS)
        return PreparedData(folder.tokenizer(), train, val, folder.fingerprint)
