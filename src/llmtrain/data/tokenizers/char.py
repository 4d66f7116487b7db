"""`char`: one token per character that occurs in the text."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.data.tokenizers.base import Ids, TokenBytes, Tokenizer
from llmtrain.errors import DataError

MAX_SHOWN = 100
"""Characters of the vocabulary in a message."""


class CharTokenizer(Tokenizer):
    """The vocabulary is the sorted set of characters in the training and validation text."""

    kind = "char"
    end_of_text = None

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self.vocab_size = len(characters)
        self._code_points = _code_points(characters)  # sorted, so an id is the index of its code point

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> "CharTokenizer":
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        if not characters:
            raise DataError("Cannot build a character vocabulary: the text is empty.")
        return cls("".join(sorted(characters)))

    def encode(self, text: str) -> Ids:
        code_points = _code_points(text)
        ids = np.searchsorted(self._code_points, code_points)
        ids[ids == self.vocab_size] = 0
        is_unknown = self._code_points[ids] != code_points
        if is_unknown.any():
            unknown = sorted({chr(code_point) for code_point in code_points[is_unknown][:1000]})
            raise DataError(
                f"The text contains characters that are not in the vocabulary of the char tokenizer: {unknown[:10]}.",
                remedy=f"Leave them out: it has {self._shown()}. In a new run, the byte tokenizer can encode any text.",
            )
        return ids.astype(np.uint32)

    def _shown(self) -> str:
        """The vocabulary, for messages."""
        if self.vocab_size <= MAX_SHOWN:
            return repr(self._characters)
        return f"{self._characters[:MAX_SHOWN]!r} and {self.vocab_size - MAX_SHOWN} more"

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._characters[i] for i in ids)

    def _to_tokenizers(self) -> Any:
        """Refuses unknown characters, as `encode` does: `<unk>`, more than one character, is not in the vocabulary."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        names = {character: index for index, character in enumerate(self._characters)}
        tokenizer = Tokenizer(models.WordLevel(names, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return tokenizer

    def token_bytes(self) -> TokenBytes:
        return np.array([len(character.encode(errors="surrogatepass")) for character in self._characters], np.int64)

    def _description(self) -> dict[str, Any]:
        return {"characters": self._characters}


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
