"""Answers of several models beside each other."""

import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmtrain.core.arguments import Source
from llmtrain.core.terminal import printable, stream_width
from llmtrain.errors import UsageError

NARROWEST = 24
"""Characters of a column, below which texts are shown one below the other."""
DEFAULT_WIDTH = 100
_GAP = "  "


def named_source(name: str, source: Source) -> Source:
    """A run by id or path, or the directory of an adapter or of a model. `source`: the options of the command."""
    from llmtrain.runs.directory import find_run

    folder = Path(name).expanduser()
    if (folder / "adapter_config.json").is_file():
        return replace(source, run=None, adapter=name)
    if (folder / "config.json").is_file():
        return replace(source, run=None, model=name)
    find_run(source.root, name)  # raises for a run that does not exist
    return replace(source, run=name)


def named_sources(names: Sequence[str], source: Source) -> list[Source]:
    """Of `llmtrain generate A B`; a second word that names no model was meant as the prompt."""
    for name in names[1:]:
        try:
            named_source(name, source)
        except UsageError as problem:
            raise UsageError(
                problem.what,
                remedy=f"A prompt needs its option: llmtrain generate {names[0]} --prompt {shlex.quote(name)}",
            ) from None
    return [named_source(name, source) for name in names]


def columns(heads: Sequence[str], texts: Sequence[str]) -> str:
    """The texts beside each other below their heads, as wide as the terminal; one below the other if that is narrow."""
    width = stream_width(sys.stdout) or DEFAULT_WIDTH
    size = (width - len(_GAP) * (len(heads) - 1)) // len(heads)
    if size < NARROWEST:
        return "\n\n".join(f"{head}:\n{printable(text)}" for head, text in zip(heads, texts, strict=True))
    cells = [
        [head[:size], "-" * min(size, len(head)), *_wrap(text, size)] for head, text in zip(heads, texts, strict=True)
    ]
    height = max(map(len, cells))
    lines = []
    for index in range(height):
        row = [cell[index] if index < len(cell) else "" for cell in cells]
        lines.append(_GAP.join(part.ljust(size) for part in row).rstrip())
    return "\n".join(lines)


def _wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for line in printable(text).splitlines():
        lines += textwrap.wrap(line, width, drop_whitespace=False, replace_whitespace=False) or [""]
    return lines
