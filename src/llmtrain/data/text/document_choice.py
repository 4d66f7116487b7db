"""Which documents of running text are used: all, unless the config asks for fewer.

A document may be larger than memory, so what depends on its content is decided in one pass over the text and applied in
a second one. Only a digest per document is kept.
"""

import hashlib
from collections.abc import Callable, Iterator

from llmtrain.core.logs import log
from llmtrain.data.text_and_examples import Split, TextChunk

Read = Callable[[], Iterator[TextChunk]]
"""Reads the text from its beginning."""
DIGEST_BYTES = 16


def digests(chunks: Iterator[TextChunk]) -> Iterator[bytes]:
    """One per document, in order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    is_open = False
    for chunk in chunks:
        digest.update(chunk.text.encode())
        is_open = True
        if chunk.ends_document:
            yield digest.digest()
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            is_open = False
    if is_open:
        yield digest.digest()


def in_split(read: Read, split: Split, val_fraction: float) -> Iterator[TextChunk]:
    """The documents of a split. The hash of a document decides: equal documents are in the same split, and a document
    stays in its split when others are added."""

    def is_chosen(digest: bytes) -> bool:
        is_val = int.from_bytes(digest[:8], "big") < val_fraction * 2**64
        return is_val == (split == "val")

    return _chosen(read, [is_chosen(digest) for digest in digests(read())])


def without_duplicates(read: Read, seen: set[bytes], label: str) -> Iterator[TextChunk]:
    """The documents that are not equal to an earlier one, nor to one of those seen before."""
    keep = []
    for digest in digests(read()):
        keep.append(digest not in seen)
        seen.add(digest)
    dropped = keep.count(False)
    if dropped:
        log("DATA", f"left out {dropped:,} of {len(keep):,} {label} documents: exact duplicates")
    return _chosen(read, keep)


def first_documents(chunks: Iterator[TextChunk], count: int) -> Iterator[TextChunk]:
    for chunk in chunks:
        yield chunk
        count -= chunk.ends_document
        if not count:
            return


def _chosen(read: Read, keep: list[bool]) -> Iterator[TextChunk]:
    number = 0
    for chunk in read():
        if keep[number]:
            yield chunk
        number += chunk.ends_document
