"""What datasets yield: chunks of running text, or examples with an answer."""

from typing import Literal, NamedTuple

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")


class TextChunk(NamedTuple):
    """Part of a document, or all of it; long documents come in several chunks."""

    text: str
    ends_document: bool


class Segment(NamedTuple):
    """Part of an example that is tokenized on its own, as the prompt is at inference."""

    text: str
    is_answer: bool


class Example(NamedTuple):
    """A prompt and its answer, or a whole conversation."""

    segments: list[Segment]
    source: str
    """The file, as the user named it."""
    line: int
    begins_special: bool = False
    """Prepend the tokenizer's own prefix (BOS)."""
    ends_text: bool = False
    """Append the end-of-text token, as part of the answer."""


class BadExample(Exception):
    """Why an example cannot be used. The reader, which knows its line, reports it or skips the example."""

    def __init__(self, reason: str, remedy: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy
