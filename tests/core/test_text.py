"""Values as text for people."""

import pytest

from llmtrain.core.text import format_bytes, one_line, plural, sparkline


@pytest.mark.parametrize(
    ("count", "text"), [(4, "4 B"), (64_000_000, "64 MB"), (1.5e3, "1.5 kB"), (2e12, "2 TB"), (1.6e16, "16,000 TB")]
)
def test_format_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_plural() -> None:
    assert [plural(1, "process"), plural(2, "process"), plural(2, "core")] == ["1 process", "2 processes", "2 cores"]
    assert [plural(2, "epoch"), plural(2, "micro-batch")] == ["2 epochs", "2 micro-batches"]


def test_one_line_collapses_whitespace_and_cuts() -> None:
    assert one_line(ValueError("a\n  b\tc")) == "a b c"
    assert one_line("a\nb c", 3) == "a b"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
        ([9, 9, 6, 6, 1, 1, 1, 1, 1, 1], "█▅▁▁▁"),
    ],
)
def test_sparkline(values: list[float], text: str) -> None:
    assert sparkline(values, 8 if len(values) != 10 else 5) == text
