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
    """Its number in the file, from 1, counted in `unit`."""
    begins_special: bool = False
    """Prepend the tokenizer's own prefix (BOS)."""
    ends_text: bool = False
    """Append the end-of-text token, as part of the answer."""
    unit: str = "line"
    """`line`; in files without lines `row` or `record`."""
