"""Run directories that are damaged, hostile or not readable: the page and the report show the rest."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from starlette.requests import Request

from demo_runs import make_run
from llmtrain.commands.loss_plot import plot_text, run_curves
from llmtrain.commands.run_tables import description_lines, run_table
from llmtrain.page import server, stream
from llmtrain.page.report import report_html
from llmtrain.page.run_catalog import RunCatalog
from llmtrain.page.values import json_text
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.listing import describe, summarize
from llmtrain.runs.view import RunView

HUGE = 10**400
"""A number that is no float."""


def row(**values: Any) -> str:
    return json.dumps({"step": 1, "train/loss": 1.0, "train/tokens": 5, "time": 1e9, **values}) + "\n"


START = {"generation": 1, "from_step": 0, "crashes": 0, "started_at": "2026-01-01T00:00:00+0000", "ended": "failed"}
SURROGATE = '{"name": "\\ud800", "machine": {"host": "\\ud800", "device": "cuda"}}'
DAMAGE = {
    "step is huge": ("metrics.jsonl", row() + row(step=HUGE) + row(step=3)),
    "loss is huge": ("metrics.jsonl", row(**{"train/loss": HUGE, "val/loss": HUGE})),
    "time is huge": ("metrics.jsonl", row(time=HUGE)),
    "time is infinite": ("metrics.jsonl", row(time=5) + row(step=2, time=math.inf)),
    "eta is infinite": ("metrics.jsonl", row(**{"time": 1e308, "train/seconds_left": 1e308})),
    "range of times is infinite": ("metrics.jsonl", row(time=-1e308) + row(step=2, **{"time": 1e308})),
    "loss cannot be drawn": ("metrics.jsonl", row(**{"train/loss": 1e308}) + row(step=2, **{"train/loss": -1e308})),
    "text is no UTF-8": ("meta.json", SURROGATE),
    "year 1": ("meta.json", '{"started_at": "0001-01-01T00:00:00", "machine": {"device": "cuda"}}'),
    "result has other types": ("finished.json", '{"parameters": "<b>", "seconds": NaN, "sample": [1]}'),
    "result is huge": ("finished.json", json.dumps({"parameters": HUGE, "seconds": HUGE, "final_val_loss": HUGE})),
    "start is huge": ("generations.json", json.dumps([START, {**START, "world_size": HUGE, "to_step": HUGE}])),
    "heartbeat is huge": ("heartbeats/rank-0.json", json.dumps({"rank": 0, "generation": 1, "time": HUGE})),
    "sample is no UTF-8": ("samples/step_30.json", '[{"prompt": "\\ud800", "answer": "x"}]'),
    "number of config is huge": ("config.yaml", "schema_version: 3\nx: 0x" + "f" * 5000 + "\n"),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("state", ["running", "failed"])
def test_damaged_file_stops_neither_page_nor_report(case: str, state: str, tmp_path: Path) -> None:
    make_run(tmp_path, "good", steps=5)
    bad = make_run(tmp_path, "bad", steps=30, state=state)
    name, text = DAMAGE[case]
    (bad / name).write_text(text)
    catalog, run = RunCatalog(str(tmp_path)), RunDirectory(bad)
    assert {row["run_id"] for row in _sent(catalog.list_since(""))["rows"]} == {"good", "bad"}
    for axis in ("step", "tokens", "time"):
        query = f"axis={axis}&metric=train/loss:100&metric=val/loss:100&smooth=0.9"
        for curve in _sent(server._curves(catalog, _request(query)))["curves"].values():
            assert curve["x"] == sorted(curve["x"])
    for read in (server._sparks, server._config):
        _sent(read(catalog, _request("")))
    _sent(server._samples(catalog, _request("step=30")))
    for value in (
        catalog.details("local/bad"),
        [vars(rank) for rank in catalog.ranks("local/bad")],
        catalog.why("local/bad"),
    ):
        _sent(value)
    events = stream.RunEvents(catalog, ["local/bad", "local/good"], "0-0,0-0", True, 0)
    assert all(stream.encode(*event) for event in events._next())
    assert "bad" in report_html([run])
    assert plot_text(run_curves(run), "bad", 80, with_color=False)
    assert "bad" in run_table([summarize(RunView(run))])
    assert description_lines(describe(RunView(run)))


def _request(query: str) -> Request:
    return Request({"type": "http", "headers": [], "query_string": f"key=local/bad&{query}".encode()})


def _sent(value: Any) -> Any:
    return json.loads(json_text(value).encode("ascii"), parse_constant=lambda text: pytest.fail(text))


def test_rows_out_of_order_are_sorted_by_step(tmp_path: Path) -> None:
    run = make_run(tmp_path, "bad", steps=1)
    (run / "metrics.jsonl").write_text("".join(row(step=step, time=step) for step in (1, 2, 5, 6, 3, 4, 5)))
    curve = RunCatalog(str(tmp_path)).metrics("local/bad").curve("train/loss", "step", 100)
    assert curve["x"] == [1, 2, 3, 4, 5, 5, 6]


def test_directory_that_may_not_be_read_does_not_hide_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who may read everything."""
    make_run(tmp_path, "good", steps=5)
    private = make_run(tmp_path, "private", steps=5)
    catalog = RunCatalog(str(tmp_path))
    assert len(catalog.list_since("")["rows"]) == 2
    own_stat = os.stat

    def stat(path: Any, *words: Any, **options: Any) -> os.stat_result:
        if str(private) + os.sep in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return own_stat(path, *words, **options)

    monkeypatch.setattr(os, "stat", stat)
    for again in (catalog, RunCatalog(str(tmp_path))):
        again.local._refreshed_at = -10.0
        assert "good" in [row["run_id"] for row in again.list_since("")["rows"]]


def test_links_out_of_run_directory_show_no_config(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs", "one", steps=5)
    secret = tmp_path / "kubeconfig"
    secret.write_text("users: [{token: secret-value}]\n")
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(secret)
    catalog = RunCatalog(str(tmp_path / "runs"))
    assert server._config(catalog, Request({"type": "http", "headers": [], "query_string": b"key=local/one"})) == {
        "config": {}
    }
    assert "secret-value" not in report_html([RunDirectory(run)])


def test_loop_of_links_is_not_inside(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path, "one", steps=5))
    (run.path / "a").symlink_to(run.path / "b")
    (run.path / "b").symlink_to(run.path / "a")
    assert not RunView(run).is_inside(run.path / "a" / "c")


def test_position_of_client_is_not_repeated(tmp_path: Path) -> None:
    """Text after a line break in it would be events."""
    (make_run(tmp_path, "one", steps=5) / "metrics.jsonl").unlink()
    for position in ("1-f\n\nevent: x\ndata: 1", "x" * 50_000, "-", "1" * 39 + "-0", ";" + "9" * 50):
        events = stream.RunEvents(RunCatalog(str(tmp_path)), ["local/one"], position, False, None)
        assert all(len(sent[2]) < 100 and sent[2].isprintable() for sent in events._next())


def test_damaged_version_of_client_reads_everything(tmp_path: Path) -> None:
    make_run(tmp_path, "one", steps=5)
    catalog = RunCatalog(str(tmp_path))
    for version in (f"{catalog.id}.{'1' * 5000}.0", f"{catalog.id}.x.0", "....", f"{catalog.id}.²."):
        assert catalog.list_since(version)["is_all"] is True


def test_report_of_directory_with_other_name(tmp_path: Path) -> None:
    run = make_run(tmp_path, "one", steps=5).rename(tmp_path / "caf\udce9-<b>")  # a byte that is no UTF-8
    text = report_html([RunDirectory(run)])
    assert "<b>" not in text.encode().decode()
