"""Cutting long text without changing its tokens."""

import re

# Before a single space between two words, or after a single line break between two lines: GPT-2's way of splitting
# text, and those made after it, never join anything across these, so cutting there gives the ids of the whole.
_SAFE_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
# Words, and whatever white space is more than the one space in front of the next word.
_WORDS = re.compile(r"\s*\S+(?:(?! \S)\s+\S+)*(?:\s+\Z)?|\s+")
_NEARBY = 4096


def last_cut(text: str) -> int:
    """The last place where the text may be cut; 0 where there is none."""
    for start in (max(0, len(text) - _NEARBY), 0):
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, start)]
        if cuts:
            return cuts[-1]
    return 0


def split_words(text: str) -> list[str]:
    """The text cut at every place where it may be cut before a space: mostly single words, so few are new."""
    return _WORDS.findall(text)
