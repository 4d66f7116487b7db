"""The data contract: what the trainer needs from a dataset, and the two base classes that most datasets extend.

    DataModule          prepare() -> PreparedData
    ├── TextData        running text: implement `identity` and `chunks`
    └── ExampleData     examples with an answer: implement `identity` and `examples`

Tokenizing, caching, shuffling and batching are the same for all of them. `data.name` is a dataset of registry.DATA, or
a plugin (docs/extending.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from llmtrain.config.data import DataSection, FilesSection, PluginDataSection
from llmtrain.data.cache_dir import token_cache_dir
from llmtrain.data.plugin_data import checked_chunks, checked_examples, checked_identity
from llmtrain.data.preferences.pair_store import PairStore
from llmtrain.data.store.directory import open_or_build
from llmtrain.data.store.example_store import ExampleStore, example_writer
from llmtrain.data.store.token_store import TokenStore, text_writer
from llmtrain.data.text.document_choice import digests, first_documents, without_duplicates
from llmtrain.data.text_and_examples import SPLITS, Example, Segment, Split, TextChunk
from llmtrain.data.tokenizers.base import Tokenizer
from llmtrain.data.tokenizers.chat_template import template_identity
from llmtrain.data.tokenizers.load import load_tokenizer, tokenizer_dir, tokenizer_identity
from llmtrain.plugins import is_plugin_class, parse_options, source_sha256

__all__ = ["DataModule", "Example", "ExampleData", "PreparedData", "Segment", "Split", "TextChunk", "TextData"]


@dataclass(frozen=True)
class PreparedData:
    """Tokenized data, ready to be batched."""

    tokenizer: Tokenizer
    train: TokenStore | ExampleStore | PairStore
    val: TokenStore | ExampleStore | PairStore
    fingerprint: str
    """SHA-256 over all tokens: equal fingerprints mean equal data, on any machine."""

    @property
    def is_text(self) -> bool:
        return isinstance(self.val, TokenStore)

    @property
    def val_tokens(self) -> int:
        return len(self.val)


@dataclass(frozen=True)
class PreparedMixture:
    """The tokenized data of several sources, in their order."""

    tokenizer: Tokenizer
    sources: list[PreparedData]
    fingerprint: str

    @property
    def is_text(self) -> bool:
        return self.sources[0].is_text

    @property
    def val_tokens(self) -> int:
        return sum(source.val_tokens for source in self.sources)


class DataModule(ABC):
    class Options(BaseModel):
        """What data.options accepts: nothing, unless a class declares its own."""

    def __init__(self, config: DataSection, seed: int) -> None:
        self.config = config
        self.options: BaseModel = parse_options(type(self), getattr(config, "options", {}))
        self.seed = seed
        self.tokenizer_spec = config.tokenizer or "byte"
        self.cache_dir = token_cache_dir(config)

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What determines the data: names, sizes, versions. Must be cheap: it is computed at every start."""

    def _source(self) -> dict[str, Any]:
        """The identity; for a plugin also its options and code, so that tokens are not reused when either has
        changed."""
        if not isinstance(self.config, PluginDataSection):
            return self.identity()
        return {
            "identity": checked_identity(type(self), self.identity),
            "class": f"{type(self).__module__}:{type(self).__qualname__}",
            "options": self.config.options,
            "code_sha256": source_sha256(type(self)),
        }

    @abstractmethod
    def prepare(self, threads: int) -> PreparedData | PreparedMixture:
        """Open the tokenized data; build it first if it is not cached."""


class TextData(DataModule):
    """Running text: a sample is any window of it."""

    def __init__(self, config: DataSection, seed: int) -> None:
        super().__init__(config, seed)
        files = config if isinstance(config, FilesSection) else None
        self.deduplicates = files is not None and files.deduplicate
        self.max_documents = None if files is None else files.max_documents
        self.adds_bos = files is not None and files.add_bos
        self.earlier: list[TextData] = []
        """Sources of a mixture whose documents count as seen."""

    @abstractmethod
    def chunks(self, split: Split) -> Iterator[TextChunk]:
        """The text of a split, in order."""

    def _texts(self) -> Iterator[str]:
        """The text of both splits: a character that occurs only in the validation text needs an id too."""
        for split in SPLITS:
            for chunk in self._documents(split):
                yield chunk.text

    def _checked(self, split: Split) -> Iterator[TextChunk]:
        if is_plugin_class(type(self)):
            return checked_chunks(type(self), lambda: self.chunks(split))
        return self.chunks(split)

    def _documents(self, split: Split) -> Iterator[TextChunk]:
        """The text of a split, without the documents that the config leaves out."""
        chunks = self._checked(split)
        if self.deduplicates:
            label = "training" if split == "train" else "validation"
            chunks = without_duplicates(lambda: self._checked(split), self._seen_before(split), label)
        if self.max_documents is not None:
            chunks = first_documents(chunks, self.max_documents)
        return chunks

    def _seen_before(self, split: Split) -> set[bytes]:
        seen: set[bytes] = set()
        for source in self.earlier:
            for each in SPLITS:
                seen.update(digests(source._checked(each)))
        if split == "val":
            seen.update(digests(self._checked("train")))
        return seen

    def _choice(self) -> dict[str, Any]:
        """What determines the tokens besides the text; empty by default, so that stores on disk keep their keys."""
        choice: dict[str, Any] = {}
        if self.deduplicates:
            choice["deduplicated"] = [source._source() for source in self.earlier]
        if self.max_documents is not None:
            choice["max_documents"] = self.max_documents
        if self.adds_bos:
            choice["bos"] = True
        return {"documents": choice} if choice else {}

    def prepare(self, threads: int) -> PreparedData:
        directory = open_or_build(
            self.cache_dir,
            identity={
                "source": self._source(),
                "tokenizer": tokenizer_identity(self.tokenizer_spec),
                **self._choice(),
            },
            tokenizer=lambda: load_tokenizer(self.tokenizer_spec, self._texts()),
            write=text_writer(self._documents, threads, self.adds_bos),
        )
        train, val = (TokenStore.open(directory, split) for split in SPLITS)
        return PreparedData(directory.tokenizer(), train, val, directory.fingerprint)


class ExampleData(DataModule):
    """Instruction or chat data: a sample is one example, or several packed into a sequence."""

    @abstractmethod
    def examples(self, split: Split) -> Iterator[Example]:
        """The examples of a split, in order."""

    def _texts(self) -> Iterator[str]:
        for split in SPLITS:
            for example in self._checked(split):
                for segment in example.segments:
                    yield segment.text

    def _checked(self, split: Split) -> Iterator[Example]:
        if is_plugin_class(type(self)):
            return checked_examples(type(self), lambda: self.examples(split))
        return self.examples(split)

    def prepare(self, threads: int) -> PreparedData:
        directory = open_or_build(
            self.cache_dir,
            identity={
                "rows": self._source(),  # not renamed: it is part of the key of stores on disk
                "tokenizer": tokenizer_identity(self.tokenizer_spec),
                "template": template_identity(tokenizer_dir(self.tokenizer_spec)),
            },
            tokenizer=lambda: load_tokenizer(self.tokenizer_spec, self._texts()),
            write=example_writer(self._checked, threads),
        )
        train, val = (ExampleStore.open(directory, split) for split in SPLITS)
        return PreparedData(directory.tokenizer(), train, val, directory.fingerprint)
