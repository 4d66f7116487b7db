"""The text that `llmtrain data` prints."""

import sys
from typing import Any

from llmtrain.core.terminal import color, discard, format_table, has_color, printable
from llmtrain.core.text import format_bytes, plural

Values = dict[str, Any]
MAX_LINES = 12
"""Lines of a part of a sample that are shown."""
BAR_WIDTH = 30
TRAINED = "+"
"""Before each line that is trained on; other lines have a space."""


def source_table(rows: list[Values]) -> str:
    cells = [["source", "kind", "documents", "tokens", "validation tokens", "on disk", "share", "epochs"]]
    for unit in ("examples", "pairs"):
        if rows[0][unit] is not None:
            cells[0][2] = unit
    for row in rows:
        count = row[cells[0][2]]
        cells.append(
            [
                row["source"],
                row["kind"],
                "-" if count is None else f"{count:,}",
                f"{row['tokens']:,}",
                f"{row['validation_tokens']:,}",
                format_bytes(row["bytes"]),
                f"{row['share']:.1%}",
                "-" if row["epochs"] is None else f"{row['epochs']:.2f}",
            ]
        )
    return format_table(cells, ("on disk", "validation tokens", "kind"))


def print_samples(samples: list[Values]) -> None:
    """Not by `say`, which colors words where they occur first: here every line that is trained on is green."""
    lines: list[str] = []
    for sample in samples:
        lines += ["", *sample_lines(sample)]
    try:
        for line in lines:
            print(line, flush=True)
    except BrokenPipeError:  # | head
        discard(sys.stdout)


def sample_lines(sample: Values) -> list[str]:
    """Lines that are trained on begin with `+`, and are green in a terminal."""
    lines = [f"A sample of {sample['source']} ({TRAINED} marks what is trained on):"]
    is_colored = has_color(sys.stdout)
    answer = None
    for part in sample["parts"]:
        if part.get("answer") != answer:  # of a preference pair
            answer = part["answer"]
            lines.append(f"    [{answer}]")
        mark = TRAINED if part["is_trained"] else " "
        text = printable(part["text"]).splitlines() or [""]
        shown = text[:MAX_LINES]
        if text[MAX_LINES:]:
            shown.append(f"... {plural(len(text) - MAX_LINES, 'more line')}")
        for line in shown:
            whole = f"  {mark} {line}"
            lines.append(color(whole, "green") if is_colored and part["is_trained"] else whole)
    return lines


def stats_lines(rows: list[Values]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if lines:
            lines.append("")
        noun = row["unit"]
        lines.append(f"{row['source']}: {row['count']:,} {noun}, {row['tokens']:,} tokens")
        if not row["count"]:
            continue
        lengths = row["lengths"]
        lines.append(
            f"  length in tokens  {lengths['shortest']:,} to {lengths['longest']:,}, median {lengths['median']:,}, "
            f"95 % up to {lengths['long']:,}"
        )
        longer = f"  over the context  {row['longer_than_context']:.1%} of the {noun}"
        if row["tokens_cut_off"] is None:
            longer += f" (longer than {row['block_size']:,} tokens; they continue in the next window)"
        else:
            longer += f" (longer than {row['block_size']:,} tokens), {row['tokens_cut_off']:.1%} of the tokens"
        lines.append(longer)
        share = row["duplicates"] / row["count"]
        lines.append(
            f"  exact duplicates  {row['duplicates']:,} {noun} ({share:.1%}), {row['duplicate_tokens']:,} tokens"
        )
        lines += _bars(row["histogram"])
    return lines


def _bars(histogram: list[Values]) -> list[str]:
    most = max(bucket["count"] for bucket in histogram)
    width = len(f"{histogram[-1]['below']:,}")
    lines = []
    for bucket in histogram:
        bar = "#" * round(BAR_WIDTH * bucket["count"] / most)
        lines.append(f"  below {bucket['below']:>{width},}  {bar:{BAR_WIDTH}}  {bucket['count']:,}")
    return lines
