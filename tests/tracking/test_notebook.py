"""The live curve in a notebook."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from llmtrain.config.logging import LoggingSection
from llmtrain.config.schema import Config
from llmtrain.core.logs import close_logging, setup_logging
from llmtrain.core.progress import is_notebook, progress_mode
from llmtrain.runs.directory import RunDirectory
from llmtrain.tracking import notebook
from llmtrain.tracking.base import TrackedRun
from llmtrain.tracking.notebook import MAX_POINTS, NotebookTracker


class Shown:
    """What IPython's display returns: a handle whose content is replaced."""

    def __init__(self) -> None:
        self.contents: list[str] = []

    def update(self, html: str) -> None:
        self.contents.append(html)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """As in a kernel, without IPython."""
    handle = Shown()
    module: Any = ModuleType("IPython.display")
    module.HTML = lambda text: text

    def display(html: str, display_id: bool) -> Shown:
        assert display_id
        handle.update(html)
        return handle

    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    return handle


def test_curve_is_updated_in_place(shown: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "REDRAW_SEC", -1.0)
    tracker = NotebookTracker(TrackedRun(RunDirectory(tmp_path / "first"), Config(), 0, 0, {}))
    for step in range(1, 5000):
        tracker.log(step, {"train/loss": 100.0 if step == 1234 else 10 / step})
        if step == 7:
            tracker.log(step, {"val/loss": 2.0})
            assert len(shown.contents) == 1 + 8
        monkeypatch.setattr(notebook, "REDRAW_SEC", -1.0 if step < 7 else 1e9)
    tracker.log(5000, {"train/loss": float("nan")})
    tracker.finish("finished", None)
    root = ElementTree.fromstring(shown.contents[-1])
    [line] = root.findall("{http://www.w3.org/2000/svg}polyline")
    points = [pair.split(",") for pair in line.attrib["points"].split()]
    assert len(points) <= MAX_POINTS
    heights = [float(y) for _, y in points]
    assert min(heights) < 60 < sorted(heights)[1], "the one peak is still there"


def test_curve_is_shown_in_notebooks_only(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.delenv("RANK", raising=False)
    setup_logging(LoggingSection())
    assert is_notebook()
    for mode in ("log", "none"):
        with progress_mode(mode):
            assert not is_notebook()
    monkeypatch.setenv("RANK", "1")
    assert not is_notebook()
    monkeypatch.delenv("RANK")
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert not is_notebook()
    close_logging()
