"""A report: runs as one HTML file that needs neither a network nor a server, nor the extra `page`.

It has the page's own scripts and style, and the curves with the minimum and maximum per pixel column.
"""

import base64
import hashlib
import html
import math
import time
from collections.abc import Sequence

from llmtrain.core.files import write_atomic
from llmtrain.errors import UsageError
from llmtrain.page.bundle import STATIC, bundle
from llmtrain.page.downsample import SMOOTHING, min_max, shortened
from llmtrain.page.own_fields import own_fields
from llmtrain.page.report_markdown import fact_table, loss_svg
from llmtrain.page.run_values import (
    Values,
    compact_ranks,
    end_sample,
    run_details,
    run_row,
    score_curves,
    scores_of,
    shown_config,
    why,
)
from llmtrain.page.series import EVAL, TRAIN, MetricsSeries, rising, rounded
from llmtrain.page.values import flat, json_text
from llmtrain.runs.data_statistics import statistics_cells, statistics_rows
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.json_values import finite
from llmtrain.runs.state import RunState
from llmtrain.runs.view import RunView
from llmtrain.version import __version__

MAX_BYTES = 2_000_000
COLUMNS = 700
FEWEST_COLUMNS = 20
AXIS_COLUMNS = 200
MAX_SAMPLES = 5
MAX_SAMPLE_TEXT = 2000


def write_report(run: RunDirectory) -> None:
    """Write report.html of a run that has just finished, whose lock this process still holds."""
    write_atomic(run.report, report_html([run], state=RunState.FINISHED))


def report_html(runs: Sequence[RunDirectory], state: RunState | None = None, sweep: Values | None = None) -> str:
    """The report as text, below MAX_BYTES. `state`: that of the runs, if it is known. `sweep`: the table of a sweep
    (sweep_values), of which these are the best trials."""
    columns = COLUMNS
    while True:
        text = _render([run_data(run, columns, state) for run in runs], sweep).encode("utf-8", "replace")
        if len(text) < MAX_BYTES or columns <= FEWEST_COLUMNS:
            break
        columns = max(FEWEST_COLUMNS, columns // 2)
    if len(text) >= MAX_BYTES:
        raise UsageError(f"A report of {len(runs)} runs would exceed {MAX_BYTES:,} bytes.", remedy="Pass fewer runs.")
    return text.decode()


def run_data(run: RunDirectory, columns: int, state: RunState | None = None) -> Values:
    """Everything that the report shows of a run."""
    view = RunView(run)
    series = MetricsSeries.read(run.metrics)
    row = run_row(view)
    row["state"] = state or view.state
    details = run_details(view)
    config = shown_config(view)
    steps = details["samples"]
    return {
        "key": f"run-{run.run_id}",
        "row": row,
        "details": details,
        "why": why(view) if row["state"] != RunState.FINISHED else None,
        "ranks": compact_ranks(view.ranks()),
        "curves": _curves(series, columns) | score_curves(scores_of(view), float),
        "axes": _axes(series),
        "best": _best(series),
        "tokens": max(filter(math.isfinite, series.train.columns["tokens"]), default=None),
        "seconds": _seconds(view, series),
        "config": flat(config),
        "changed": flat(own_fields(config)),
        "data": statistics_cells(data) if (data := statistics_rows(view.meta)) else [],
        "sample_step": steps[-1] if steps else None,
        "samples": _samples(view, steps),
    }


def _curves(series: MetricsSeries, columns: int) -> Values:
    curves = {}
    for name in (*TRAIN, *EVAL):
        curves[name] = series.curve(name, "step", columns, weight=SMOOTHING if name == "train/loss" else 0.0)
    curves |= series.source_curves("step", columns)
    return {name: curve for name, curve in curves.items() if curve["x"]}


def _axes(series: MetricsSeries) -> Values:
    """Steps, and the tokens and seconds at each of them, to interpolate between."""
    columns = series.train.columns
    steps, seconds = min_max(columns["step"], rising(columns["time"], series.time_base), AXIS_COLUMNS)
    by_step = dict(zip(columns["step"], columns["tokens"], strict=True))
    tokens = [by_step[step] if math.isfinite(by_step[step]) else 0.0 for step in steps]
    return {"step": shortened(steps), "time": rounded("time", seconds), "tokens": shortened(tokens)}


def _best(series: MetricsSeries) -> Values | None:
    columns = series.eval.columns
    rows = [row for row in zip(columns["val/loss"], columns["step"], strict=True) if math.isfinite(row[0])]
    if not rows:
        return None
    loss, step = min(rows)
    return {"loss": loss, "step": int(step)}


def _seconds(view: RunView, series: MetricsSeries) -> float | None:
    """Of all starts, as `runs show` has it; if they are not recorded, from the first row to the last."""
    if view.seconds is not None:
        return view.seconds
    times = list(filter(math.isfinite, series.train.columns["time"]))
    if len(times) > 1:
        return finite(round(times[-1] - times[0], 1))
    return finite(view.result.get("seconds"))


def _samples(view: RunView, steps: list[int]) -> list[Values]:
    """The last answers to trainer.eval_prompts, else the sample of the result."""
    rows = (view.samples(steps[-1]) if steps else []) or end_sample(view)
    return [{name: text[:MAX_SAMPLE_TEXT] for name, text in row.items()} for row in rows[:MAX_SAMPLES]]


def _render(runs: list[Values], sweep: Values | None) -> str:
    written = time.time()
    data = {"written": round(written), "version": __version__, "runs": runs, "sweep": sweep}
    plot = (STATIC / "vendor" / "uplot.min.js").read_text(encoding="utf-8")
    script = bundle("report.js")
    style = "".join((STATIC / name).read_text(encoding="utf-8") for name in ("vendor/uplot.min.css", "page.css"))
    names = ", ".join(run["row"]["run_id"] for run in runs[:3])
    if len(runs) > 3:
        names += ", ..."
    return (
        (STATIC / "report.html")
        .read_text(encoding="utf-8")
        .format(
            version=__version__,
            title=html.escape(f"{names} · llmtrain"),
            hashes=" ".join(_hash(text) for text in (plot, script)),
            style=style,
            written=time.strftime("%Y-%m-%d %H:%M", time.localtime(written)),
            still="\n".join(_still(run) for run in runs),
            data=_inlined(data),
            plot=plot,
            script=script,
        )
    )


def _inlined(data: Values) -> str:
    """JSON that cannot end the element it is in, nor begin a comment."""
    return json_text(data).replace("<", "\\u003c")


def _hash(script: str) -> str:
    """The script may run by its hash only: nothing in the data can run, whatever it contains."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _still(run: Values) -> str:
    """What a viewer without scripts shows, such as the preview of a mail."""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in fact_table(run)
    )
    return f'<h1>{html.escape(run["row"]["run_id"])}</h1>\n<table class="plain">{rows}</table>\n{loss_svg([run])}'
