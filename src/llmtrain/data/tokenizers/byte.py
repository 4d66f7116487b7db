"""`byte`: one token per UTF-8 byte."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from llmtrain.config.schema import VOCABULARIES
from llmtrain.data.tokenizers.base import Ids, TokenBytes, Tokenizer
from llmtrain.data.tokenizers.byte_level import as_characters, byte_level_tokenizer


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes. NUL, which text does not contain, separates documents."""

    kind = "byte"
    vocab_size = VOCABULARIES[kind]
    end_of_text = 0

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def _to_tokenizers(self) -> Any:
        # NUL is under its own name: as a special token it is found in a text before bytes are written as characters.
        names = {chr(byte) if byte == self.end_of_text else as_characters(bytes([byte])): byte for byte in range(256)}
        return byte_level_tokenizer(names, [], end_of_text=chr(self.end_of_text), splits_words=False)

    def token_bytes(self) -> TokenBytes:
        lengths = np.ones(self.vocab_size, np.int64)
        lengths[self.end_of_text] = 0
        return lengths
