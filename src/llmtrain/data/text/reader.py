"""Reading text files of any size, strictly UTF-8, in chunks that can be tokenised one by one. A byte order mark is no
part of the text. A file with NUL bytes is no text: most are UTF-16, and the byte tokenizer's end of text is NUL."""

import codecs
import glob
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llmtrain.content_hash import files_sha256
from llmtrain.data.tokenizers.split import last_cut
from llmtrain.data.types import TextChunk
from llmtrain.errors import DataError

BLOCK_BYTES = 1 << 20
LONGEST_PIECE = 16 << 20


def expand_files(patterns: Iterable[str], field: str) -> list[Path]:
    """Files named by paths and globs, in the order given, each once."""
    files: list[Path] = []
    for pattern in patterns:
        expanded = str(Path(pattern).expanduser())
        names = [expanded] if Path(expanded).is_file() else glob.glob(expanded, recursive=True)
        found = sorted(Path(name) for name in names if Path(name).is_file())
        if not found:
            raise DataError(
                f"{field}: no file matches {pattern}.",
                remedy="Paths are relative to the directory the command is run in.",
            )
        files += [path for path in found if path not in files]
    if not any(path.stat().st_size for path in files):
        raise DataError(f"{field}: the text is empty ({', '.join(map(str, files[:5]))}).")
    return files


def files_identity(files: Sequence[Path], cache_dir: Path) -> str:
    """A hash over names and contents, wherever the files lie. Times are not enough: tools that copy files set them."""
    try:
        return files_sha256(files, cache_dir)
    except OSError as problem:
        raise DataError(f"{problem.filename or files[0]} cannot be read: {problem.strerror or problem}.") from None


def read_chunks(path: Path) -> Iterator[TextChunk]:
    """One document: the file, in chunks of about a megabyte cut between lines."""
    held, cut = "", 0
    for text in _read_text(path):
        held += text
        cut = last_cut(held) or (len(held) if len(held) > LONGEST_PIECE else 0)
        if cut:
            yield TextChunk(held[:cut], ends_document=False)
            held = held[cut:]
    if held or cut:
        yield TextChunk(held, ends_document=True)


def _read_text(path: Path) -> Iterator[str]:
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
                        f"{path}, line {line}: a NUL character, at byte {offset + nul}.",
                        remedy="Convert a UTF-16 file with iconv -f UTF-16 -t UTF-8; else remove it (tr -d '\\0').",
                    )
                if offset == 0:
                    text = text.removeprefix("\ufeff")
                offset += len(block)
                lines += block.count(b"\n")
                yield text
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}.") from None
