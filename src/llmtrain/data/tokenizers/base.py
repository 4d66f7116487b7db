"""What every tokenizer has: encode, decode, save and a hash of its vocabulary."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.core.files import read_json, write_json

Ids = npt.NDArray[np.unsignedinteger[Any]]
TokenBytes = npt.NDArray[np.int64]
"""(vocab_size,): length of the UTF-8 text of each token; 0 for special tokens."""
DESCRIPTION = "llmtrain_tokenizer.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERIC_CLASS = "PreTrainedTokenizerFast"
"""The class of transformers that takes tokenizer.json as it is. Others, and AutoTokenizer without a class, rebuild the
tokenizer in the way of one model, and then ids differ."""
_ADDS_TOKENS = ("add_bos_token", "add_eos_token")


class Tokenizer(ABC):
    """Text to token ids and back.

    A tokenizer saves itself into a directory with everything needed to load it again, so that a run can be sampled
    and evaluated without its training text.
    """

    kind: str
    vocab_size: int
    end_of_text: int | None
    """Token id between documents; None if the tokenizer has none."""

    @abstractmethod
    def encode(self, text: str) -> Ids: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    def encode_many(self, texts: Sequence[str], threads: int) -> Iterable[Ids]:  # noqa: ARG002
        """Encode several texts, on several threads where the implementation supports it."""
        return map(self.encode, texts)

    def token_bytes(self) -> TokenBytes | None:
        """The length of each token's text; None if tokens have no length of their own, as after normalization."""
        return None

    def prefix_ids(self) -> list[int]:
        """Ids that the tokenizer puts before a text for its model (BOS); often none."""
        return []

    @property
    def start_of_text(self) -> int | None:
        """Token id that a text may begin with; None if the tokenizer has none."""
        return self.end_of_text

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / DESCRIPTION, {"kind": self.kind, "sha256": self.sha256(), **self._description()})

    def export(self, directory: Path, context_length: int) -> None:
        """Save it for a model trained on the ids of `encode`: transformers' AutoTokenizer gives the same ids."""
        self.save(directory)
        tokenizer = self._to_tokenizers()
        tokenizer.save(str(directory / TOKENIZER_FILE))
        values: dict[str, Any] = {}
        if self.end_of_text is not None and (name := tokenizer.id_to_token(self.end_of_text)) is not None:
            values = {"bos_token": name, "eos_token": name}
        values |= read_json(directory / TOKENIZER_CONFIG) or {}
        values |= {
            "tokenizer_class": GENERIC_CLASS,
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
        }
        for key in _ADDS_TOKENS:  # `encode` does not add them
            values.pop(key, None)
        write_json(directory / TOKENIZER_CONFIG, values)

    @abstractmethod
    def _to_tokenizers(self) -> Any:
        """The same tokenizer as a tokenizers.Tokenizer, for `export`."""

    def sha256(self) -> str:
        """Hash of what the ids mean: equal hashes decode equal ids to equal text."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        # Covers the whole vocabulary, so compute it once.
        facts = [self.kind, self.vocab_size, self.end_of_text, self._description(), self._vocabulary()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _description(self) -> dict[str, Any]:
        """Fields saved beside the kind that are needed to load the tokenizer again."""
        return {}

    def _vocabulary(self) -> dict[str, int]:
        """The id of every token, unless the kind and the description already determine it."""
        return {}
