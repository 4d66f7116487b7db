"""The size of the tokenized data on disk, from the sizes of the files that it is made of. Without torch."""

import glob
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.data import DataSection, ExampleBatchesSection, FilesSection, PreferenceJsonlSection
from llmtrain.config.mixture import data_sections
from llmtrain.core.text import plural

BYTES_PER_TOKEN = 4
"""Of text, with a vocabulary of tens of thousands: about 4.5 for English, 3 for code. Not measured."""
ANSWER_BYTES = 1
"""Per token of examples: whether it is part of an answer."""
PACKED_SUFFIXES = (".parquet", ".gz", ".zst", ".bz2", ".xz", ".zip")
"""Files whose text is larger than they are."""


@dataclass(frozen=True)
class TokenStoreSize:
    size: int | None
    """Bytes; None if it is not known."""
    source: str
    """`3 files at 4 bytes per token`, or why it is not known."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def token_store_size(data: DataSection, vocab_size: int | None) -> TokenStoreSize:
    sections = data_sections(data)
    names = [name for section in sections for name in _names(section)]
    if not names:
        return TokenStoreSize(None, "the data is not in files of this machine")
    if vocab_size is None:
        return TokenStoreSize(None, "the vocabulary is not known")
    paths = sorted(_files(names))
    if not paths:
        return TokenStoreSize(None, f"there is no file {names[0]} on this machine")
    if any(path.suffix.lower() in PACKED_SUFFIXES for path in paths):
        return TokenStoreSize(None, "the size of compressed text is not known before it is read")
    per_token = 1 if vocab_size <= 1 << 8 else BYTES_PER_TOKEN
    try:
        tokens = sum(path.stat().st_size for path in paths) // per_token
    except OSError as problem:
        return TokenStoreSize(None, f"a file cannot be read: {problem.strerror}")
    width = _number_bytes(vocab_size)
    if isinstance(sections[0], ExampleBatchesSection | PreferenceJsonlSection):
        width += ANSWER_BYTES
    return TokenStoreSize(tokens * width, f"{plural(len(paths), 'file')} at {plural(per_token, 'byte')} per token")


def _names(data: DataSection) -> Iterator[str]:
    """Files and globs. None if the data comes from a dataset."""
    if isinstance(data, FilesSection):
        yield from data.files
        yield from data.val_files
    for name in (getattr(data, "train_file", None), getattr(data, "val_file", None)):
        if name:
            yield name


def _files(names: Iterable[str]) -> set[Path]:
    found: set[Path] = set()
    for name in names:
        pattern = str(Path(name).expanduser())
        found.update(Path(path) for path in [pattern, *glob.glob(pattern, recursive=True)])
    return {path for path in found if path.is_file()}


def _number_bytes(vocab_size: int) -> int:
    """As data/store chooses the type of its numbers."""
    if vocab_size <= 1 << 8:
        return 1
    return 2 if vocab_size <= 1 << 16 else 4
