"""Reading text files of any size, strictly UTF-8, in chunks that can be tokenized independently.

A byte order mark is dropped. NUL bytes are refused: most such files are UTF-16, and NUL is the byte tokenizer's end of
text.
"""

import codecs
import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llmtrain.data.content_hash import files_sha256
from llmtrain.data.text_and_examples import TextChunk
from llmtrain.data.tokenizers.split import last_split_point
from llmtrain.errors import DataError

BLOCK_BYTES = 1 << 20
MAX_CHUNK_CHARACTERS = 16 << 20


def expand_files(patterns: Iterable[str], field: str) -> list[Path]:
    """The files that match paths and globs, in this order, without duplicates. `field` is for messages."""
    files: list[Path] = []
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        names = [expanded] if Path(expanded).is_file() else glob.glob(expanded, recursive=True)
        matches = sorted(Path(name) for name in names if Path(name).is_file())
        if not matches:
            raise DataError(
                f"{field}: no file matches {pattern}.",
                remedy=f"Relative paths start at the current directory, {Path.cwd()}.",
            )
        files += [path for path in matches if path not in files]
    if not any(path.stat().st_size for path in files):
        raise DataError(f"{field}: all files are empty ({', '.join(map(str, files[:5]))}).")
    return files


def files_identity(files: Sequence[Path], cache_dir: Path) -> str:
    """Hash of names and contents, wherever the files are. Modification times are not enough: copying sets them."""
    try:
        return files_sha256(files, cache_dir)
    except OSError as problem:
        raise DataError(f"Cannot read {problem.filename or files[0]}: {problem.strerror or problem}.") from None


def read_chunks(path: Path) -> Iterator[TextChunk]:
    """The file as one document."""
    return split_document(read_blocks(path))


def split_document(parts: Iterable[str]) -> Iterator[TextChunk]:
    """A document that comes in parts of about a megabyte, in chunks of that size."""
    buffer = ""
    split = 0
    for text in parts:
        buffer += text
        split = last_split_point(buffer)
        if not split and len(buffer) > MAX_CHUNK_CHARACTERS:  # one endless word: memory comes before its ids
            split = len(buffer)
        if split:
            yield TextChunk(buffer[:split], ends_document=False)
            buffer = buffer[split:]
    if buffer or split:
        yield TextChunk(buffer, ends_document=True)


def read_blocks(path: Path) -> Iterator[str]:
    """The text in blocks of about a megabyte."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = lines = 0
    try:
        with path.open("rb") as file:
            while True:
                block = file.read(BLOCK_BYTES)
                pending = len(decoder.getstate()[0])
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as problem:
                    line = lines + problem.object[: problem.start].count(b"\n") + 1
                    raise DataError(
                        f"{path}, line {line}: not valid UTF-8 at byte {offset - pending + problem.start} "
                        f"(0x{problem.object[problem.start]:02x}).",
                        remedy="Convert the file, for example with iconv -t UTF-8.",
                    ) from None
                if not block:
                    break
                nul = block.find(b"\0")
                if nul >= 0:
                    line = lines + block[:nul].count(b"\n") + 1
                    raise DataError(
                        f"{path}, line {line}: NUL character at byte {offset + nul}.",
                        remedy="Convert a UTF-16 file with iconv -f UTF-16 -t UTF-8; else remove it with tr -d '\\0'.",
                    )
                if offset == 0:
                    text = text.removeprefix("\ufeff")
                offset += len(block)
                lines += block.count(b"\n")
                yield text
    except OSError as problem:
        raise DataError(f"Cannot read {path}: {problem.strerror or problem}.") from None
