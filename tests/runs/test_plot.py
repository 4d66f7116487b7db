"""Loss curves in the terminal."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from demo_runs import make_run
from llmtrain.commands.loss_plot import compared_curves, plot_text, run_curves
from llmtrain.runs.directory import RunDirectory

Cli = Callable[..., Any]


@pytest.mark.parametrize("width", [40, 80, 160])
def test_plot_fits(width: int, tmp_path: Path) -> None:
    curves = run_curves(RunDirectory(make_run(tmp_path, "first", steps=3000, extras=False)))
    lines = plot_text(curves, "first", width, with_color=False).splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert "\x1b" in plot_text(curves, "first", width, with_color=True)
    assert sum("⠀" < character <= "⣿" for line in lines for character in line) > width // 2


def test_curves_differ_without_colors(tmp_path: Path) -> None:
    curves = run_curves(RunDirectory(make_run(tmp_path, "first", steps=300, extras=False)))
    text = plot_text(curves, "first", 80, with_color=False)
    legend = {
        line.split()[-2]: line.split()[-3] for line in text.splitlines() if "training" in line or "validation" in line
    }
    assert legend["training"] != legend["validation"]


def test_runs_show_plot(cli: Cli, workdir: Path) -> None:
    make_run(workdir / "runs", "first", steps=100, extras=False)
    done = cli("runs", "show", "first", "--plot")
    assert done.code == 0, done.err
    assert "validation" in done.out
    assert cli("runs", "show", "first", "--plot", "--json").code == 64


def test_runs_compare_plot(cli: Cli, workdir: Path) -> None:
    for run_id in ("first", "second"):
        make_run(workdir / "runs", run_id, steps=100, extras=False)
    done = cli("runs", "compare", "first", "second", "--plot")
    assert done.code == 0, done.err
    table, *plots = re.split(r"^ *(?:training|validation) loss *$", done.out, flags=re.M)
    assert "run_id" in table
    assert len(plots) == 2
    for plot in plots:
        markers = {line.split()[-2]: line.split()[-3] for line in plot.splitlines() if re.search("first|second", line)}
        assert markers["first"] != markers["second"]
    assert cli("runs", "compare", "first", "second", "--plot", "--json").code == 64


def test_curves_of_runs_with_one_id_are_kept_apart(tmp_path: Path) -> None:
    runs = [RunDirectory(make_run(tmp_path / place, "first", steps=10, extras=False)) for place in ("a", "b")]
    assert len(compared_curves(runs)["training"]) == 2


def test_run_without_metrics_has_no_plot(cli: Cli, workdir: Path) -> None:
    run = make_run(workdir / "runs", "first", steps=1, extras=False)
    assert cli("runs", "show", "first", "--plot").code == 0
    (run / "metrics.jsonl").unlink()
    done = cli("runs", "show", "first", "--plot")
    assert done.code == 0, done.err
