"""Tokenizers: text to ids and back. `load_tokenizer` takes what `data.tokenizer` says.

A tokenizer saves itself into a directory with everything that is needed to use it again, so that a run can be
sampled and evaluated long after its training text is gone.
"""

import hashlib
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmtrain.config.schema import VOCABULARIES
from llmtrain.data.text.split import split_words
from llmtrain.errors import DataError, UsageError
from llmtrain.files import read_json, write_json

Ids = npt.NDArray[np.unsignedinteger[Any]]
BUILT_IN = ("byte", "char", "gpt2")
_MOST_WORDS_SEEN = 1_000_000
DESCRIPTION = "llmtrain_tokenizer.json"
# Without these transformers would open a saved directory with another template or other special tokens.
_KEPT_FILES = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
_END_OF_TEXT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class Tokenizer(ABC):
    kind: str
    vocab_size: int
    end_of_text: int | None
    """Id put between documents; None where the tokenizer has none."""

    @abstractmethod
    def encode(self, text: str) -> Ids: ...

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    def encode_many(self, texts: Sequence[str], threads: int) -> Iterable[Ids]:  # noqa: ARG002
        """As encode, for several texts at once; those that can use several cores."""
        return map(self.encode, texts)

    def prefix_ids(self) -> list[int]:
        """What the tokenizer itself puts in front of a text for its model (BOS); often nothing."""
        return []

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / DESCRIPTION, {"kind": self.kind, "sha256": self.sha256(), **self._description()})

    def sha256(self) -> str:
        """Over what the ids mean. Two tokenizers may give two texts the same ids."""
        return self._sha256

    @cached_property  # hashes the whole vocabulary
    def _sha256(self) -> str:
        facts = [self.kind, self.vocab_size, self.end_of_text, self._description(), self._vocabulary()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _description(self) -> dict[str, Any]:
        return {}

    def _vocabulary(self) -> dict[str, int]:
        """The id of every token, where `kind` and the description do not tell."""
        return {}


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes. NUL, which text does not contain, stands between documents."""

    kind = "byte"
    vocab_size = VOCABULARIES[kind]
    end_of_text = 0

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class CharTokenizer(Tokenizer):
    """One id a character that occurs in the training text."""

    kind = "char"
    end_of_text = None

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self.vocab_size = len(characters)
        self._codes = _code_points(characters)  # sorted, so that an id is a position

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> "CharTokenizer":
        found: set[str] = set()
        for text in texts:
            found.update(text)
        if not found:
            raise DataError("The text is empty, so no character vocabulary can be made from it.")
        return cls("".join(sorted(found)))

    def encode(self, text: str) -> Ids:
        codes = _code_points(text)
        ids = np.searchsorted(self._codes, codes)
        ids[ids == self.vocab_size] = 0
        unknown = self._codes[ids] != codes
        if unknown.any():
            characters = sorted({chr(code) for code in codes[unknown][:1000]})
            raise DataError(
                f"The text has characters that the char tokenizer never saw in training: {characters[:10]}.",
                remedy="Use the byte tokenizer, which knows every text.",
            )
        return ids.astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._characters[i] for i in ids)

    def _description(self) -> dict[str, Any]:
        return {"characters": self._characters}


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte pairs, by tiktoken."""

    kind = "gpt2"
    vocab_size = VOCABULARIES[kind]
    end_of_text = 50256

    def __init__(self) -> None:
        import tiktoken

        try:
            self._encoding = tiktoken.get_encoding("gpt2")
        except Exception as problem:  # tiktoken lets whatever its downloader raises through
            raise DataError(
                f"The files of the gpt2 tokenizer are not here and cannot be fetched: {type(problem).__name__}.",
                remedy='On a machine with network access run `python -c "import tiktoken; '
                "tiktoken.get_encoding('gpt2')\"` with TIKTOKEN_CACHE_DIR set to a directory, bring that "
                "directory here, and set TIKTOKEN_CACHE_DIR to it.",
            ) from None

    def encode(self, text: str) -> Ids:
        return np.asarray(self._encoding.encode_to_numpy(text, disallowed_special=()))

    def encode_many(self, texts: Sequence[str], threads: int) -> Iterable[Ids]:
        with ThreadPoolExecutor(threads) as pool:  # tiktoken lets go of the interpreter lock
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode(list(ids)))


class HFTokenizer(Tokenizer):
    """A Hugging Face tokenizer directory: tokenizer.json, or vocab.json with merges.txt."""

    kind = "hf"

    def __init__(self, folder: Path) -> None:
        import tokenizers

        self._folder = folder
        try:
            if (folder / "tokenizer.json").is_file():
                self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
                pairs = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
                self._tokenizer = tokenizers.Tokenizer.from_str(pairs.to_str())
            else:
                raise DataError(
                    f"{folder} has no tokenizer.json (nor vocab.json with merges.txt).",
                    remedy="Name a directory that save_pretrained of a fast tokenizer wrote.",
                )
        except DataError:
            raise
        except Exception as problem:
            raise DataError(f"The tokenizer in {folder} cannot be read: {problem}.") from None
        # A tokenizer may have been saved with the settings of the model it served.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Ids may have gaps: the highest one decides.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.end_of_text = self._find_end_of_text()
        self._seen: dict[str, bytes] = {}
        layout = json.loads(self._tokenizer.to_str())
        self._may_be_cut = (
            layout["normalizer"] is None
            and '"ByteLevel"' in json.dumps(layout["pre_tokenizer"])
            # Such a token reaches over the space at which text is cut.
            and not any(token["rstrip"] or " " in token["content"] for token in layout["added_tokens"])
        )

    def _find_end_of_text(self) -> int | None:
        named = (read_json(self._folder / "tokenizer_config.json") or {}).get("eos_token")
        if isinstance(named, dict):
            named = named.get("content")
        names = ([named] if named else []) + list(_END_OF_TEXT_NAMES)
        ids = (self._tokenizer.token_to_id(name) for name in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_many(self, texts: Sequence[str], threads: int) -> Iterator[Ids]:  # noqa: ARG002 (it uses all cores)
        if self._may_be_cut:
            yield from map(self._encode_words, texts)
        else:
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.uint32)

    def _encode_words(self, text: str) -> Ids:
        """As encode, several times faster: a word is looked up when it was seen before, and most were."""
        words = split_words(text)
        if len(self._seen) > _MOST_WORDS_SEEN:
            self._seen = {}
        new = [word for word in dict.fromkeys(words) if word not in self._seen]
        for word, encoding in zip(new, self._tokenizer.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._seen[word] = np.array(encoding.ids, dtype=np.uint32).tobytes()
        return np.frombuffer(b"".join(map(self._seen.__getitem__, words)), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _vocabulary(self) -> dict[str, int]:
        # Not tokenizer.json as a whole: how it is written depends on the version of the library.
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def prefix_ids(self) -> list[int]:
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return list(whole[: next(starts, 0)])

    def save(self, folder: Path) -> None:
        super().save(folder)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        settings = read_json(self._folder / "tokenizer_config.json")
        if settings:
            write_json(folder / "tokenizer_config.json", settings)
        for name in _KEPT_FILES:
            if (self._folder / name).is_file() and folder.resolve() != self._folder.resolve():
                shutil.copyfile(self._folder / name, folder / name)


def load_tokenizer(spec: str, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer that data.tokenizer names; `char` is built from the texts."""
    if spec == "byte":
        return ByteTokenizer()
    if spec == "gpt2":
        return GPT2Tokenizer()
    if spec == "char":
        return CharTokenizer.from_texts(texts)
    return HFTokenizer(_directory(spec))


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """What `Tokenizer.save` wrote."""
    description = read_json(folder / DESCRIPTION)
    if not isinstance(description, dict):
        raise DataError(f"{folder} holds no saved tokenizer ({DESCRIPTION} is missing or damaged).")
    if description.get("kind") == "char":
        tokenizer: Tokenizer = CharTokenizer(str(description.get("characters", "")))
    elif description.get("kind") == "hf":
        tokenizer = HFTokenizer(folder)
    else:
        tokenizer = load_tokenizer(str(description.get("kind")))
    if description.get("sha256") not in (None, tokenizer.sha256()):  # None: saved by an earlier version
        raise DataError(
            f"The tokenizer in {folder} was changed after it was saved: its vocabulary is another one.",
            remedy="Put its files back from a copy.",
        )
    return tokenizer


def saved_sha256(folder: Path) -> str | None:
    """Tokenizer.sha256 of a saved tokenizer; None where there is none that can be used."""
    try:
        return load_saved_tokenizer(folder).sha256()
    except DataError:
        return None


def replace_saved_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save in place of another tokenizer, of which no file may stay."""
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer.save(folder)


def is_saved_tokenizer(folder: Path) -> bool:
    """Whether load_saved_tokenizer will find its files whole."""
    description = read_json(folder / DESCRIPTION)
    if not isinstance(description, dict) or description.get("kind") not in (*BUILT_IN, "hf"):
        return False
    if description["kind"] == "char":
        return bool(description.get("characters"))
    return description["kind"] != "hf" or isinstance(read_json(folder / "tokenizer.json"), dict)


def tokenizer_identity(spec: str) -> str:
    """What decides the ids a spec gives, besides the text itself. Cheap: it is asked at every start."""
    if spec in BUILT_IN:
        return spec
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        path = _directory(spec) / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
    return f"hf:{digest.hexdigest()}"


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> HFTokenizer:
    """Learn byte pairs from text (GPT-2's splitting) and write a Hugging Face tokenizer directory."""
    import tokenizers

    smallest = 257  # every byte, and end of text
    if vocab_size < smallest:
        raise UsageError(f"A vocabulary of {vocab_size} is too small: byte pairs start at {smallest}.")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=["<|endoftext|>"], show_progress=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UsageError(f"Cannot write to {folder}: {problem.strerror or problem}.") from None
    trained.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "GPT2TokenizerFast",
        "eos_token": "<|endoftext|>",
        "bos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return HFTokenizer(folder)


def tokenizer_dir(spec: str) -> Path | None:
    """The directory that data.tokenizer names; None for a built-in one."""
    return None if spec in BUILT_IN else _directory(spec)


def _directory(spec: str) -> Path:
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        raise UsageError(
            f"data.tokenizer '{spec}' is neither built in nor a directory.",
            known=BUILT_IN,
            remedy="`llmtrain tokenizer train` makes a tokenizer directory.",
        )
    return folder


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
