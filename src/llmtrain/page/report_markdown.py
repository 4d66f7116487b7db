"""A report as Markdown with SVG curves, for a README or a model card."""

import json
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

from llmtrain.core.svg import Curve, curve_svg
from llmtrain.core.text import format_bytes
from llmtrain.plan.cost import money
from llmtrain.runs.sources import source_cells

Values = dict[str, Any]
CHARTS = {
    "loss": "Loss",
    "lr": "Learning rate",
    "tokens-per-second": "Tokens per second",
}
_METRICS = {"lr": "train/lr", "tokens-per-second": "train/tokens_per_second"}


def fact_table(run: Values) -> list[tuple[str, str]]:
    """(name, value) of what is known about a run."""
    row = run["row"]
    steps = f"{row['step']:,}"
    if row["max_steps"]:
        steps += f" of {row['max_steps']:,}"
    best = None
    if run["best"]:
        best = f"{run['best']['loss']:.4f} at step {run['best']['step']:,}"
    facts = [
        ("State", row["state"]),
        ("Step", steps),
        ("Training loss", _number(row["loss"], ".4f")),
        ("Validation loss", _number(row["val_loss"], ".4f")),
        ("Best validation loss", best),
        *_scores(run),
        ("Parameters", _number(run["details"]["parameters"], ",")),
        ("Tokens", _number(run["tokens"], ",.0f")),
        ("Tokens per second, last", _number(row["tokens_per_second"], ",.0f")),
        ("MFU", _number(row["mfu"], ".1%")),
        ("Processes", str(row["processes"])),
        ("Restarts", str(row["restarts"])),
        ("Duration", _beside(run["seconds"], row["predicted_seconds"], _duration)),
        ("Peak memory", _beside(row["peak_memory_bytes"], row["predicted_memory_bytes"], format_bytes)),
        ("GPU-hours", _number(row["gpu_hours"], ",.1f")),
        ("Cost", None if row["cost"] is None else money(row["cost"], row["currency"])),
    ]
    return [(name, text) for name, text in facts if text is not None]


def _scores(run: Values) -> list[tuple[str, str | None]]:
    """The newest scores on tasks."""
    scored = run["details"]["task_scores"]
    return [(name, _number(value, ".4f")) for name, value in (scored[-1]["values"] if scored else {}).items()]


def report_markdown(runs: Sequence[Values], name: str) -> dict[str, str]:
    """File name -> content: `name`.md, and an SVG per chart beside it, which Markdown shows as an image."""
    ids = ", ".join(_escape(run["row"]["run_id"]) for run in runs)
    lines = [f"# {ids}", "", *_table(runs), ""]
    images = {}
    for key, title in CHARTS.items():
        svg = _chart(runs, key, title)
        if svg:
            file = f"{name}-{key}.svg"
            images[file] = svg
            lines += [f"![{title}]({quote(file)})", ""]
    for run in runs:
        lines += [*_why(run), *_sources(run, is_only=len(runs) == 1)]
        lines += [*_data(run, is_only=len(runs) == 1), *_config(run, is_only=len(runs) == 1)]
    return {f"{name}.md": "\n".join(lines).rstrip() + "\n", **images}


def loss_svg(runs: Sequence[Values]) -> str:
    return _chart(runs, "loss", "Loss")


def _chart(runs: Sequence[Values], key: str, title: str) -> str:
    """The curves of one run with their names, or of several, each in a color of its own."""
    curves: list[Curve] = []

    def add(label: str, curve: Values | None, color: int, dots: bool = False) -> None:
        if curve:
            curves.append(Curve(label, curve["x"], curve["y"], color, dots))

    is_loss = key == "loss"
    if len(runs) == 1:
        found = runs[0]["curves"]
        if is_loss:
            add("training", _smooth(found.get("train/loss")), 0)
            add("validation", found.get("val/loss"), 1, dots=True)
        else:
            add("", found.get(_METRICS[key]), 0)
        return curve_svg(title, curves) if curves else ""

    for color, run in enumerate(runs):
        name = run["row"]["run_id"]
        found = run["curves"]
        if is_loss:
            add(name, _smooth(found.get("train/loss")), color)
            add("", found.get("val/loss"), color, dots=True)
        else:
            add(name, found.get(_METRICS[key]), color)
    if is_loss:
        title += " (dots: validation)"
    return curve_svg(title, curves) if curves else ""


def _smooth(curve: Values | None) -> Values | None:
    """The moving average of a curve, if it has one."""
    return (curve or {}).get("smooth") or curve


def _table(runs: Sequence[Values]) -> list[str]:
    if len(runs) == 1:
        rows = [["", ""], *([name, text] for name, text in fact_table(runs[0]))]
    else:
        tables = [dict(fact_table(run)) for run in runs]
        names = list(dict.fromkeys(name for table in tables for name in table))
        rows = [["", *(run["row"]["run_id"] for run in runs)]]
        rows += [[name, *(table.get(name, "") for table in tables)] for name in names]
    lines = ["| " + " | ".join(_escape(cell) for cell in row) + " |" for row in rows]
    return [lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]]


def _why(run: Values) -> list[str]:
    why = run["why"]
    if not why:
        return []
    return [f"**{_escape(run['row']['run_id'])}: {_escape(why['what'])}** {_escape(why['remedy'] or '')}", ""]


def _sources(run: Values, is_only: bool) -> list[str]:
    rows = run["row"]["sources"]
    if not rows:
        return []
    title = "Sources" if is_only else f"Sources of {run['row']['run_id']}"
    return _titled_table(title, source_cells(rows))


def _data(run: Values, is_only: bool) -> list[str]:
    """What `llmtrain data stats` has counted."""
    title = "Data" if is_only else f"Data of {run['row']['run_id']}"
    return _titled_table(title, run["data"]) if run["data"] else []


def _titled_table(title: str, cells: list[list[str]]) -> list[str]:
    head, *rows = [f"| {' | '.join(map(_escape, row))} |" for row in cells]
    return [f"## {title}", "", head, "|" + " --- |" * len(cells[0]), *rows, ""]


def _config(run: Values, is_only: bool) -> list[str]:
    """Fields that differ from their defaults and do not follow from others."""
    title = "Config" if is_only else f"Config of {run['row']['run_id']}"
    rows = [f"| `{_code(name)}` | {_escape(_as_in_yaml(value))} |" for name, value in run["changed"].items()]
    return [f"## {title}", "", "| Field | Value |", "| --- | --- |", *rows, ""] if rows else []


def _as_in_yaml(value: Any) -> str:
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _code(text: str) -> str:
    """Text between backticks, in a cell of a table."""
    return " ".join(text.split()).replace("`", "'").replace("|", "\\|")


def _escape(text: str) -> str:
    """Plain text in Markdown: no HTML, and no cell or line break."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("[", "\\[").replace("`", "\\`")


def _number(value: float | None, style: str) -> str | None:
    return None if value is None else format(value, style)


def _beside(actual: float | None, predicted: float | None, text: Callable[[float], str]) -> str | None:
    """`23.3 GB (predicted 24.1 GB)`"""
    if actual is None:
        return None
    return text(actual) if predicted is None else f"{text(actual)} (predicted {text(predicted)})"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60} s"
    return f"{minutes // 60} h {minutes % 60} min"
