"""Splitting long text without changing its tokens."""

import re

# Before a single space between two words, or after a single line break between two lines: pre-tokenizers like GPT-2's
# never join anything across these, so the ids of the parts are the ids of the whole.
_SPLIT_POINT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
# A word with the space before it, and any further white space.
_WORDS = re.compile(r"\s*\S+(?:(?! \S)\s+\S+)*(?:\s+\Z)?|\s+")
_TAIL = 4096


def last_split_point(text: str) -> int:
    """The last index at which the text can be split; 0 if there is none."""
    for start in (max(0, len(text) - _TAIL), 0):
        points = [match.start() for match in _SPLIT_POINT.finditer(text, start)]
        if points:
            return points[-1]
    return 0


def split_words(text: str) -> list[str]:
    """The text split before every single space: mostly single words, most of which occur often."""
    return _WORDS.findall(text)
