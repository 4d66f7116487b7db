"""Loss curves in the terminal, for --plot of `runs show`, `runs compare` and `status`."""

import shutil
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from llmtrain.core.terminal import discard, has_color, printable_line

if TYPE_CHECKING:
    from llmtrain.runs.directory import RunDirectory

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]
WIDTH_OF_A_FILE = 100
MAX_WIDTH = 160
HEIGHT = 22
MAX_LOSS = 1e100
"""Larger values, and those that are not numbers, cannot be drawn."""
COLORS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+")
MARKERS = ("braille", "o", "x", "+", "*", "#")
"""Without colors, curves differ by their marker; the first is a line of braille dots."""


def run_curves(run: "RunDirectory") -> Curves:
    """`training` and `validation`: steps and losses of a run directory."""
    from llmtrain.page.series import MetricsSeries

    series = MetricsSeries.read(run.metrics)
    train = series.train.columns
    evaluated = series.eval.columns
    return {
        "training": (train["step"], train["train/loss"]),
        "validation": (evaluated["step"], evaluated["val/loss"]),
    }


def compared_curves(runs: "Sequence[RunDirectory]") -> dict[str, Curves]:
    """`training` and `validation`: the curve of each run, by its id, or by its path if two have one id."""
    names = [run.run_id for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    by_run = {name: run_curves(run) for name, run in zip(names, runs, strict=True)}
    return {name: {run: curves[name] for run, curves in by_run.items()} for name in ("training", "validation")}


def print_plot(curves: Curves, title: str) -> None:
    """Print the curves, as wide as the terminal."""
    columns = WIDTH_OF_A_FILE
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size((WIDTH_OF_A_FILE, HEIGHT)).columns
    text = plot_text(curves, title, min(columns, MAX_WIDTH), with_color=has_color(sys.stdout))
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard(sys.stdout)


def plot_text(curves: Curves, title: str, width: int, with_color: bool, height: int = HEIGHT) -> str:
    """One line if there is no loss yet."""
    import plotext

    from llmtrain.core.svg import short_number, ticks
    from llmtrain.page.downsample import min_max

    shown = {}
    for name, (steps, losses) in curves.items():
        points = [(step, loss) for step, loss in zip(steps, losses, strict=True) if abs(loss) < MAX_LOSS]
        if points:
            shown[name] = points
    if not shown:
        return "No losses yet."
    plotext.clear_figure()
    plotext.limitsize(False, False)  # the width is decided here
    plotext.plotsize(width, height)
    plotext.theme("clear")
    all_steps: list[float] = []
    for name, look in zip(curves, cycle(zip(COLORS, MARKERS, strict=True)), strict=False):
        if name not in shown:
            continue
        points = shown[name]
        color, marker = look
        xs = array("d", [step for step, _ in points])
        ys = array("d", [loss for _, loss in points])
        all_steps += xs
        x, y = min_max(xs, ys, 2 * width)  # a character has two columns of dots
        draw = plotext.plot if len(x) > 1 else plotext.scatter  # a line of one point is not drawn
        draw(x, y, label=name, marker="braille" if with_color else marker, color=color)
    plotext.title(printable_line(title))
    plotext.xlabel("step")
    places = ticks(min(all_steps), max(all_steps), width // 16)  # a label takes about 16 columns
    plotext.xticks(places, [short_number(place) for place in places])
    text = str(plotext.build())
    return text if with_color else str(plotext.uncolorize(text))
