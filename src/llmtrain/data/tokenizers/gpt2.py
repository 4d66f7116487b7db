"""`gpt2`: GPT-2's byte-pair encoding, by tiktoken."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from llmtrain.config.schema import VOCABULARIES
from llmtrain.data.tokenizers.base import Ids, TokenBytes, Tokenizer
from llmtrain.data.tokenizers.byte_level import as_characters, byte_level_tokenizer, merges_of
from llmtrain.errors import DataError

END_OF_TEXT = "<|endoftext|>"


class GPT2Tokenizer(Tokenizer):
    kind = "gpt2"
    vocab_size = VOCABULARIES[kind]
    end_of_text = 50256

    def __init__(self) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as problem:  # tiktoken does not wrap the exceptions of its downloader
            raise DataError(
                f"The gpt2 tokenizer files are not cached and cannot be downloaded: {type(problem).__name__}.",
                remedy='On a machine with network access, run `python -c "import tiktoken; '
                "tiktoken.get_encoding('gpt2')\"` with TIKTOKEN_CACHE_DIR set to a directory. Copy that "
                "directory to this machine and set TIKTOKEN_CACHE_DIR to it. Or set data.tokenizer to byte, or to a "
                "directory of `llmtrain tokenizer train`: both work offline.",
            ) from None

    def encode(self, text: str) -> Ids:
        return np.asarray(self._encoding.encode_to_numpy(text, disallowed_special=()))

    def encode_many(self, texts: Sequence[str], threads: int) -> Iterable[Ids]:
        with ThreadPoolExecutor(threads) as pool:  # tiktoken releases the GIL
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode(list(ids)))

    def _to_tokenizers(self) -> Any:
        ranks = {self._encoding.decode_single_token_bytes(i): i for i in range(self.end_of_text)}
        names = {as_characters(token): rank for token, rank in ranks.items()}
        vocabulary = {**names, END_OF_TEXT: self.end_of_text}
        return byte_level_tokenizer(vocabulary, merges_of(ranks), END_OF_TEXT, splits_words=True)

    def token_bytes(self) -> TokenBytes:
        lengths = [len(self._encoding.decode_single_token_bytes(token)) for token in range(self.end_of_text)]
        return np.array([*lengths, 0], np.int64)  # the last one is end of text
