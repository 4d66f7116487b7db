"""A small live curve of the loss below the cell of a notebook that trains."""

import time
from typing import Any

from llmtrain.core.svg import Curve, Points, curve_svg, halved
from llmtrain.runs.state import EndStatus
from llmtrain.tracking.base import Metrics, TrackedRun, Tracker

REDRAW_SEC = 1.0
MAX_POINTS = 600
WIDTH = 620
HEIGHT = 220


class NotebookTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        from IPython.display import HTML, display

        self._run_id = run.directory.run_id
        self._html = HTML
        self._curves: dict[str, Points] = {"train/loss": ([], []), "val/loss": ([], [])}
        self._drawn_at = 0.0
        self._display: Any = display(HTML(self._svg()), display_id=True)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, points in self._curves.items():
            value = metrics.get(name)
            if value is not None and abs(value) < float("inf"):
                points[0].append(step)
                points[1].append(value)
            if len(points[0]) > MAX_POINTS:
                self._curves[name] = halved(points)
        if time.monotonic() - self._drawn_at > REDRAW_SEC:
            self._draw()

    def finish(self, status: EndStatus, result: dict[str, Any] | None) -> None:  # noqa: ARG002
        self._draw()

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._display.update(self._html(self._svg()))

    def _svg(self) -> str:
        names = {"train/loss": "training", "val/loss": "validation"}
        curves = []
        for color, (name, (xs, ys)) in enumerate(self._curves.items()):
            if xs:
                curves.append(Curve(names[name], xs, ys, color, has_dots=name == "val/loss"))
        return curve_svg(f"Loss of {self._run_id}", curves, WIDTH, HEIGHT)
