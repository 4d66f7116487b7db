"""`byte`: one token per UTF-8 byte."""

from collections.abc import Sequence

import numpy as np

from llmtrain.config.schema import VOCABULARIES
from llmtrain.data.tokenizers.base import Ids, TokenBytes, Tokenizer


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes. NUL, which text does not contain, separates documents."""

    kind = "byte"
    vocab_size = VOCABULARIES[kind]
    end_of_text = 0

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self) -> TokenBytes:
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[self.end_of_text] = 0
        return lengths
