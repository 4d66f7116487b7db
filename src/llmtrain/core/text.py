"""Values as text for people: one line of an error, a count with its noun, a list, a number of bytes, a small curve."""

from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def one_line(value: object, limit: int | None = None) -> str:
    """The text with each run of whitespace as one space, cut to `limit` characters."""
    return " ".join(str(value).split())[:limit]


def plural(count: int, noun: str) -> str:
    """`1 thread`, `2 epochs`, `2 processes`, `2 micro-batches`"""
    if count == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,} {noun}{ending}"


def first_names(names: Sequence[str], count: int = 3) -> str:
    """`a, b, c and 4 more`"""
    text = ", ".join(names[:count])
    if len(names) > count:
        text += f" and {len(names) - count} more"
    return text


def format_bytes(count: float) -> str:
    """1540 -> `1.54 kB`, in powers of 1000 as disks and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 1000 else f"{count:,.0f} TB"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of the values in at most `width` characters, each the mean of its part: `█▆▄▃▂▂▁▁`"""
    count = min(width, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low = min(means, default=0.0)
    span = (max(means, default=0.0) - low) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((mean - low) / span * top)] for mean in means)
