"""A row: a prompt and its answer, or a whole conversation. Each is a sample of its own."""

from typing import NamedTuple


class Segment(NamedTuple):
    """A part of a row that is tokenised by itself, as the prompt is when the model is used."""

    text: str
    is_answer: bool


class Example(NamedTuple):
    segments: list[Segment]
    source: str
    """The file as the user named it."""
    line: int
    begins_special: bool = False
    """Put the ids in front that the tokenizer itself puts there (BOS)."""
    ends_text: bool = False
    """Put the tokenizer's end-of-text id behind, as part of the answer."""


class BadExample(Exception):
    """Why a row cannot be used. Whoever knows its line makes an error of it, or leaves the row out."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy
