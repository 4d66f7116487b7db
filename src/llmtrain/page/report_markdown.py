"""A report as Markdown with SVG curves, for a README or a model card."""

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from llmtrain.svg import Curve, curve_svg

Values = dict[str, Any]
CHARTS = {
    "loss": "Loss",
    "lr": "Learning rate",
    "tokens-per-second": "Tokens per second",
}
_METRICS = {"lr": "train/lr", "tokens-per-second": "train/tokens_per_second"}


def fact_table(run: Values) -> list[tuple[str, str]]:
    """(name, value) of what is known about a run."""
    row, best, details = run["row"], run["best"], run["details"]
    steps = f"{row['step']:,}" + (f" of {row['max_steps']:,}" if row["max_steps"] else "")
    facts = [
        ("State", row["state"]),
        ("Step", steps),
        ("Training loss", _number(row["loss"], ".4f")),
        ("Validation loss", _number(row["val_loss"], ".4f")),
        ("Best validation loss", f"{best['loss']:.4f} at step {best['step']:,}" if best else None),
        ("Parameters", _number(details["parameters"], ",")),
        ("Tokens", _number(run["tokens"], ",.0f")),
        ("Tokens per second", _number(row["tokens_per_second"], ",.0f")),
        ("MFU", _number(row["mfu"], ".1%")),
        ("Processes", str(row["processes"])),
        ("Restarts", str(row["restarts"])),
        ("Duration", _duration(run["seconds"])),
        ("GPU-hours", _number(row["gpu_hours"], ",.1f")),
    ]
    return [(name, text) for name, text in facts if text is not None]


def report_markdown(runs: Sequence[Values], name: str) -> dict[str, str]:
    """File name -> content: `name`.md, and an SVG per chart beside it, which Markdown shows as an image."""
    images = {f"{name}-{key}.svg": _chart(runs, key, title) for key, title in CHARTS.items()}
    images = {file: text for file, text in images.items() if text}
    titles = {f"{name}-{key}.svg": title for key, title in CHARTS.items()}
    lines = [f"# {', '.join(_escape(run['row']['run_id']) for run in runs)}", ""]
    lines += [*_table(runs), ""]
    for file in images:
        lines += [f"![{titles[file]}]({quote(file)})", ""]
    for run in runs:
        lines += [*_why(run), *_config(run, is_only=len(runs) == 1)]
    return {f"{name}.md": "\n".join(lines).rstrip() + "\n", **images}


def loss_svg(runs: Sequence[Values]) -> str:
    return _chart(runs, "loss", "Loss")


def _chart(runs: Sequence[Values], key: str, title: str) -> str:
    """The curves of one run with their names, or of several, each in a color of its own."""
    curves = []
    for number, run in enumerate(runs):
        name, found, is_only = run["row"]["run_id"], run["curves"], len(runs) == 1
        if key != "loss":
            rows = [("" if is_only else name, found.get(_METRICS[key]), number, False)]
        else:
            train = found.get("train/loss")
            rows = [("training" if is_only else name, (train or {}).get("smooth") or train, number, False)]
            rows += [("validation" if is_only else "", found.get("val/loss"), number + is_only, True)]
        curves += [Curve(label, curve["x"], curve["y"], color, dots) for label, curve, color, dots in rows if curve]
    title += " (dots: validation)" if key == "loss" and len(runs) > 1 else ""
    return curve_svg(title, curves) if curves else ""


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


def _config(run: Values, is_only: bool) -> list[str]:
    """Fields that differ from their defaults."""
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


def _duration(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if not minutes:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
