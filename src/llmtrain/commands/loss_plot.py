"""Loss curves in the terminal, for `runs show --plot` and `status --plot`."""

import shutil
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from llmtrain.terminal import discard, has_color, printable_line

if TYPE_CHECKING:
    from llmtrain.runs.directory import RunDirectory

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]
WIDTH_OF_A_FILE, MAX_WIDTH, HEIGHT = 100, 160, 22
MAX_LOSS = 1e100
"""Larger values, and those that are not numbers, cannot be drawn."""
COLORS = {"training": "blue+", "validation": "orange+"}


def run_curves(run: "RunDirectory") -> Curves:
    """`training` and `validation`: steps and losses of a run directory."""
    from llmtrain.page.series import MetricsSeries

    series = MetricsSeries.read(run.metrics)
    train, evaluated = series.train.columns, series.eval.columns
    return {"training": (train["step"], train["train/loss"]), "validation": (evaluated["step"], evaluated["val/loss"])}


def print_plot(curves: Curves, title: str) -> None:
    """Print the curves, as wide as the terminal."""
    columns = shutil.get_terminal_size((WIDTH_OF_A_FILE, HEIGHT)).columns if sys.stdout.isatty() else WIDTH_OF_A_FILE
    text = plot_text(curves, title, min(columns, MAX_WIDTH), with_color=has_color(sys.stdout))
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def plot_text(curves: Curves, title: str, width: int, with_color: bool, height: int = HEIGHT) -> str:
    """One line if there is no loss yet."""
    import plotext

    from llmtrain.page.downsample import min_max
    from llmtrain.svg import short_number, ticks

    drawable = {
        name: [point for point in zip(*curve, strict=True) if abs(point[1]) < MAX_LOSS]
        for name, curve in curves.items()
    }
    shown = {name: tuple(zip(*points, strict=True)) for name, points in drawable.items() if points}
    if not shown:
        return "No losses yet."
    plotext.clear_figure()
    plotext.limitsize(False, False)  # the width is decided here
    plotext.plotsize(width, height)
    plotext.theme("clear")
    for name, (xs, ys) in shown.items():
        x, y = min_max(array("d", xs), array("d", ys), 2 * width)  # a character has two columns of dots
        draw = plotext.plot if len(x) > 1 else plotext.scatter
        draw(x, y, label=name, marker="braille", color=COLORS.get(name))
    plotext.title(printable_line(title))
    plotext.xlabel("step")
    steps = [step for xs, _ in shown.values() for step in xs]
    places = ticks(min(steps), max(steps), width // 16)
    plotext.xticks(places, [short_number(place) for place in places])
    text = str(plotext.build())
    return text if with_color else str(plotext.uncolorize(text))
