"""From `data.tokenizer`, or from a saved directory, to a Tokenizer."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from llmtrain.compat.run_files import is_tokenizer_hash
from llmtrain.core.files import read_json
from llmtrain.data.tokenizers.base import DESCRIPTION, Tokenizer
from llmtrain.data.tokenizers.byte import ByteTokenizer
from llmtrain.data.tokenizers.char import CharTokenizer
from llmtrain.data.tokenizers.gpt2 import GPT2Tokenizer
from llmtrain.data.tokenizers.hf import HFTokenizer
from llmtrain.errors import DataError, UsageError

BUILT_IN = ("byte", "char", "gpt2")


def load_tokenizer(spec: str, texts: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer named by data.tokenizer; `char` is built from the texts."""
    if spec == "byte":
        return ByteTokenizer()
    if spec == "gpt2":
        return GPT2Tokenizer()
    if spec == "char":
        return CharTokenizer.from_texts(texts)
    return HFTokenizer(_directory(spec))


def tokenizer_dir(spec: str) -> Path | None:
    """The directory named by data.tokenizer; None for a built-in tokenizer."""
    return None if spec in BUILT_IN else _directory(spec)


def tokenizer_identity(spec: str) -> str:
    """What determines the ids of a tokenizer, apart from the text. Cheap: computed at every start."""
    if spec in BUILT_IN:
        return spec
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        path = _directory(spec) / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
    return f"hf:{digest.hexdigest()}"


def load_saved_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer that Tokenizer.save wrote; its hash is checked."""
    description = read_json(directory / DESCRIPTION)
    if not isinstance(description, dict):
        raise DataError(f"{directory} does not contain a saved tokenizer: {DESCRIPTION} is missing or damaged.")
    if description.get("kind") == "char":
        tokenizer: Tokenizer = CharTokenizer(str(description.get("characters", "")))
    elif description.get("kind") == "hf":
        tokenizer = HFTokenizer(directory)
    else:
        tokenizer = load_tokenizer(str(description.get("kind")))
    if not is_tokenizer_hash(description.get("sha256"), tokenizer.sha256()):
        raise DataError(
            f"The tokenizer in {directory} was modified after it was saved: its vocabulary has changed.",
            remedy="Restore its files from a backup.",
        )
    return tokenizer


def saved_sha256(directory: Path) -> str | None:
    """Tokenizer.sha256 of a saved tokenizer; None if it is missing or unusable."""
    try:
        return load_saved_tokenizer(directory).sha256()
    except DataError:
        return None


def replace_saved_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Save a tokenizer after removing every file of the one saved there before."""
    shutil.rmtree(directory, ignore_errors=True)
    tokenizer.save(directory)


def _directory(spec: str) -> Path:
    directory = Path(spec).expanduser()
    if not directory.is_dir():
        raise UsageError(
            f"data.tokenizer must be a built-in tokenizer or a directory, got '{spec}'.",
            known=BUILT_IN,
            remedy="Train one with `llmtrain tokenizer train`.",
        )
    return directory
