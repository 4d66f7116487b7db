"""Parts of a log file by byte offset: only what is on screen is read and sent."""

import os
from pathlib import Path
from typing import Any

from llmtrain.core.files import open_text

CHUNK_BYTES = 1 << 15
MAX_MATCHES = 200
_BLOCK_BYTES = 1 << 20
_LINE_CHARACTERS = 400


def read_chunk(path: Path, *, before: int | None = None, after: int | None = None) -> dict[str, Any]:
    """Complete lines that end at or before the byte `before` (default: the end of the file), or that begin at or after
    the byte `after`. A line that is longer than a chunk is cut."""
    with open_text(path) as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        if after is not None:
            begin = min(max(0, after), size)
            data = os.pread(descriptor, CHUNK_BYTES, begin)
            last = data.rfind(b"\n") + 1
            if last or len(data) < CHUNK_BYTES:  # else one line fills the chunk, and is cut
                data = data[:last]
        else:
            end = size if before is None else min(max(0, before), size)
            begin = max(0, end - CHUNK_BYTES)
            data = os.pread(descriptor, end - begin, begin)
            if before is None:
                data = data[: data.rfind(b"\n") + 1]  # the last line may still be written
            first = data.find(b"\n") + 1 if begin else 0
            if first and first < len(data):
                begin += first
                data = data[first:]
    return {"begin": begin, "end": begin + len(data), "size": size, "text": data.decode("utf-8", "replace")}


def line_begin(path: Path, offset: int) -> int:
    """Where the line that contains a byte begins."""
    with open_text(path) as file:
        begin = max(0, offset - CHUNK_BYTES)
        data = os.pread(file.fileno(), max(0, offset - begin), begin)
    return begin + data.rfind(b"\n") + 1


def search(path: Path, text: str) -> dict[str, Any]:
    """The last lines that contain the text, in any case, with their offsets; newest first."""
    needle = text.encode().lower()
    matches: list[dict[str, Any]] = []
    with open_text(path) as file:
        descriptor = file.fileno()
        end = os.fstat(descriptor).st_size
        tail = b""
        while end > 0 and len(matches) < MAX_MATCHES:
            begin = max(0, end - _BLOCK_BYTES)
            data = os.pread(descriptor, end - begin, begin) + tail
            first = data.find(b"\n") + 1 if begin else 0
            if begin and not first:  # one very long line
                first = len(data)
            matches += _matches(data[first:], begin + first, needle, MAX_MATCHES - len(matches))
            tail = data[:first]  # the end of a line that begins in an earlier block
            if len(tail) >= _BLOCK_BYTES:
                tail = b""
            end = begin
    return {"matches": matches, "is_complete": end <= 0}


def _matches(data: bytes, offset: int, needle: bytes, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    lowered = data.lower()
    position = len(data)
    while len(found) < limit and (position := lowered.rfind(needle, 0, position)) >= 0:
        begin = data.rfind(b"\n", 0, position) + 1
        end = data.find(b"\n", position)
        if end < 0:
            end = len(data)
        line = data[begin:end]
        shown = line.decode("utf-8", "replace")[:_LINE_CHARACTERS]
        found.append({"offset": offset + begin, "line": shown})
        position = begin
    return found
