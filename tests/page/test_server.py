"""What the page sends: runs, curves, ranks, logs, causes, and increments."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import anyio
from starlette.testclient import TestClient

from demo_runs import HOSTILE, hold_lock, make_run, write_heartbeats, write_rows
from fork_server import IN_BACKGROUND
from limits import limit, wait_until
from llmtrain.core.install import install_command
from llmtrain.page import actions, local_runs, log_file, run_catalog, run_values, stream
from llmtrain.page.local_runs import LocalRuns
from llmtrain.page.run_catalog import NotFound, RunCatalog, Shared
from llmtrain.page.security import CSRF_HEADER, Access
from llmtrain.page.server import make_app
from llmtrain.page.stream import RunEvents
from llmtrain.runs.compare import compare
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.lock import RunLock
from llmtrain.runs.task_scores import write_task_scores
from llmtrain.runs.view import RunView

BASE = "http://127.0.0.1:8642"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(local_runs, "REFRESH_SEC", 0.0)
    return tmp_path / "runs"


def client_of(root: Path, **options: Any) -> TestClient:
    access = Access(port=8642, **options)
    client = TestClient(make_app(RunCatalog(str(root)), access), base_url=BASE)
    client.get("/", params={"token": access.token})
    return client


@pytest.fixture
def client(root: Path) -> TestClient:
    return client_of(root)


def rows_of(client: TestClient) -> dict[str, dict[str, Any]]:
    return {row["run_id"]: row for row in client.get("/api/runs").json()["rows"]}


# The list.


def test_list_names_state_and_cause(client: TestClient, root: Path) -> None:
    for state in ("finished", "running", "interrupted", "failed", "killed"):
        make_run(root, f"a-{state}", steps=40, max_steps=80, state=state)
    rows = rows_of(client)
    assert {name.removeprefix("a-"): row["state"] for name, row in rows.items()} == {
        state: state for state in ("finished", "running", "interrupted", "failed", "killed")
    }
    failed = rows["a-failed"]
    assert failed["why"] == "Loss is not finite in step 70."
    assert (failed["step"], failed["max_steps"], failed["restarts"]) == (40, 80, 0)
    assert rows["a-running"]["eta"] > time.time() - 60
    assert rows["a-finished"]["why"] is None
    assert all(row["val_loss"] for row in rows.values())


def test_list_sends_only_changes(client: TestClient, root: Path) -> None:
    for number in range(5):
        make_run(root, f"run-{number}", steps=10, extras=False)
    first = client.get("/api/runs").json()
    assert first["is_all"] is True
    again = client.get("/api/runs", params={"since": first["version"]}).json()
    assert (again["rows"], again["removed"], again["is_all"]) == ([], [], False)
    write_rows(root / "run-3", 11, 12, 0.0, 0.5, 6e-4, 10)
    shutil.rmtree(root / "run-4")
    change = client.get("/api/runs", params={"since": first["version"]}).json()
    assert [row["run_id"] for row in change["rows"]] == ["run-3"]
    assert change["removed"] == ["local/run-4"]
    other_server = client.get("/api/runs", params={"since": "00000000.9.9"}).json()
    assert len(other_server["rows"]) == 4


def test_missing_root_is_a_problem_and_not_an_error(client: TestClient) -> None:
    value = client.get("/api/runs").json()
    assert value["rows"] == []
    assert value["problems"][0]["where"] == "local"
    assert value["problems"][0]["remedy"]


def test_validation_loss_far_from_end_is_found(root: Path) -> None:
    run = make_run(root, "long", steps=3000, max_steps=20_000, extras=False)  # evaluated every 1,000 steps
    assert run_values.run_row(RunView(RunDirectory(run)))["val_loss"] is not None


def test_gpu_hours_of_two_starts(root: Path) -> None:
    run = make_run(root, "twice", steps=20, world_size=4, started=time.time() - 7200)
    rows = json.loads((run / "generations.json").read_text())
    first = {**rows[0], "ended": "stopped", "started_at": "2026-01-01T00:00:00+0000"}
    phases = {"reading data": 0.2, "first step": 7.8}
    second = {**rows[0], "generation": 2, "started_at": "2026-01-01T02:00:00+0000", "start_seconds": phases}
    (run / "generations.json").write_text(json.dumps([first, second]))
    (path,) = (run / "exits").iterdir()
    report = json.loads(path.read_text())
    path.unlink()
    for generation, at in ((1, "2026-01-01T01:00:00Z"), (2, "2026-01-01T02:30:00Z")):
        path = run / "exits" / f"2026010{generation}-x-0.json"
        path.write_text(json.dumps({**report, "generation": generation, "time": at}))
    row = run_values.run_row(RunView(RunDirectory(run)))
    assert row["gpu_hours"] == 6.0  # (1 h + 0.5 h) x 4
    assert row["restarts"] == 1
    starts = run_values.run_details(RunView(RunDirectory(run)))["generations"]
    assert [start["until"] - start["started"] for start in starts] == [3600, 1800]
    assert [start["start_seconds"] for start in starts] == [{}, phases]


def test_rows_have_the_cost_where_prices_are_given(root: Path) -> None:
    priced = make_run(
        root, "priced", steps=7200, step_sec=1, prices="{gpu_hour: {h200: 3.0}, currency: EUR}", extras=False
    )
    row = run_values.run_row(RunView(RunDirectory(priced)))
    assert row["cost"] == pytest.approx(6.0, abs=0.02)  # 2 h
    assert (row["cost_projected"], row["currency"]) == (None, "EUR")
    row = run_values.run_row(RunView(RunDirectory(make_run(root, "plain", extras=False))))
    assert (row["cost"], row["cost_projected"], row["currency"]) == (None, None, None)


def test_rows_have_what_distinguishes_runs(root: Path) -> None:
    run = make_run(root, "first", steps=40, lr=2e-3, seed=7, extras=False, started=time.time() - 3600)
    row = run_values.run_row(RunView(RunDirectory(run)))
    shown = {name: row[name] for name in ("lr", "seed", "parameters", "model", "dataset")}
    assert shown == {"lr": 2e-3, "seed": 7, "parameters": 124_000_000, "model": "gpt", "dataset": "data/web.txt"}
    assert row["seconds"] == pytest.approx(25, abs=1)  # until its last row
    (run / "config.yaml").unlink()
    row = run_values.run_row(RunView(RunDirectory(run)))
    assert [row[name] for name in shown] == [None, None, 124_000_000, None, None]


def test_best_validation_loss_is_that_of_the_best_evaluation(root: Path) -> None:
    run = make_run(root, "first", steps=10, max_steps=1000, state="interrupted", extras=False)
    with (run / "metrics.jsonl").open("a") as file:
        for step, loss, is_best in ((50, 3.0, 1.0), (100, 2.0, 1.0), (150, 2.5, 0.0)):
            file.write(json.dumps({"step": step, "val/loss": loss, "val/is_best": is_best, "time": 0}) + "\n")
    row = run_values.run_row(RunView(RunDirectory(run)))
    assert (row["val_loss"], row["best_val_loss"]) == (2.5, 2.0)


def test_groups_have_mean_deviation_and_number_as_runs_compare_has_them(client: TestClient, root: Path) -> None:
    for lr in (3e-4, 1e-3):
        for seed in (1, 2):
            make_run(root, f"lr{lr * 1e4:.0f}-{seed}", steps=40, lr=lr, seed=seed, extras=False)
    make_run(root, "other", steps=40, lr=0.5, state="failed", extras=False)
    empty = make_run(root, "damaged", steps=40, extras=False)
    (empty / "config.yaml").write_text("{")
    answer = client.get("/api/groups", params={"field": "trainer.lr", "text": "lr"}).json()
    assert answer["fields"] == ["run.seed", "trainer.lr"]
    runs = [RunDirectory(root / name) for name in ("lr3-1", "lr3-2", "lr10-1", "lr10-2")]
    expected = compare(runs, ["trainer.lr"])
    assert answer["best"]["values"] == expected["best"]["values"] == {"trainer.lr": 0.001}
    for group, own in zip(answer["groups"], expected["groups"], strict=True):
        assert (group["values"], sorted(group["run_ids"]), group["n"]) == (own["values"], sorted(own["run_ids"]), 2)
        for name in ("train_loss", "val_loss"):
            assert group[name] == pytest.approx(own[name])
    assert client.get("/api/groups", params={"field": "trainer.lr"}).json()["without_config"] == 1
    only_failed = client.get("/api/groups", params={"field": "trainer.lr", "state": "failed"}).json()
    assert [group["run_ids"] for group in only_failed["groups"]] == [["other"]]
    assert client.get("/api/groups", params={"field": "no.such"}).json()["groups"] == []


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "generations.json", "meta.json", "finished.json", "config.yaml", "lock"]
)
def test_damaged_file_does_not_hide_run(client: TestClient, root: Path, name: str) -> None:
    run = make_run(root, "damaged", steps=10)
    (run / name).write_bytes(b"\xff\x00{[not json\n")
    make_run(root, "whole", steps=10)
    assert set(rows_of(client)) == {"damaged", "whole"}
    for path in ("/api/run", "/api/curves", "/api/ranks", "/api/why", "/api/config"):
        assert client.get(path, params={"key": "local/damaged", "metric": "train/loss:100"}).status_code == 200, path


def test_run_that_disappears_answers_404(client: TestClient, root: Path) -> None:
    shutil.rmtree(make_run(root, "gone", steps=10))
    for path in ("/api/run", "/api/curves", "/api/why", "/api/config", "/api/log"):
        response = client.get(path, params={"key": "local/gone", "rank": 0})
        assert response.status_code == 404, path
        assert response.json()["what"]


# One run.


def test_curves_say_how_many_points(client: TestClient, root: Path) -> None:
    make_run(root, "long", steps=5000, extras=False)
    query = {"key": "local/long", "metric": ["train/loss:100", "val/loss:100"], "smooth": "0.9"}
    value = client.get("/api/curves", params=query).json()
    loss = value["curves"]["train/loss"]
    assert loss["total"] == 5000
    assert 150 <= len(loss["x"]) <= 204
    assert len(loss["smooth"]["x"]) <= 104
    assert value["curves"]["val/loss"]["total"] == 20
    zoomed = client.get("/api/curves", params={**query, "from": 1000, "to": 1150}).json()["curves"]["train/loss"]
    assert zoomed["total"] == 151
    assert len(zoomed["x"]) >= 151


def test_scores_are_read_again_only_when_there_are_others(
    client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(make_run(root, "one", steps=40, extras=False))
    reads = []

    def counted(view: RunView) -> list[dict[str, Any]]:
        reads.append(view)
        return run_values.scores_of(view)

    monkeypatch.setattr(run_catalog, "scores_of", counted)

    def curve() -> list[float]:
        value = client.get("/api/curves", params={"key": "local/one", "metric": "train/loss:50"}).json()
        found: list[float] = value["curves"]["tasks/items/acc"]["y"]
        return found

    for step, score in ((10, 0.25), (20, 0.5), (20, 0.75)):  # the last one replaces the one before
        write_task_scores(run, step, {"items": {"metrics": {"acc": score}}})
        assert curve() == curve()
        assert curve()[-1] == score
    assert len(reads) == 3


@pytest.mark.parametrize("steps", [12, 40, 2000])
def test_smoothing_is_exact_if_asked_for_and_fits_the_curve_if_not(client: TestClient, root: Path, steps: int) -> None:
    make_run(root, "one", steps=steps, extras=False)
    query = {"key": "local/one", "metric": "train/loss:100"}
    curve = client.get("/api/curves", params=query).json()["curves"]["train/loss"]
    assert curve.get("smooth", {"weight": 0})["weight"] == (0.9 if steps == 2000 else 0)
    exact = client.get("/api/curves", params={**query, "smooth": "0.8"}).json()["curves"]["train/loss"]
    assert exact["smooth"]["weight"] == 0.8
    assert exact["smooth"]["y"] != exact["y"]


@pytest.mark.parametrize("axis", ["tokens", "time"])
def test_marks_are_placed_on_axis(client: TestClient, root: Path, axis: str) -> None:
    make_run(root, "one", steps=100, state="interrupted")
    value = client.get("/api/curves", params={"key": "local/one", "axis": axis, "metric": "train/loss:50"}).json()
    kinds = {mark["kind"]: mark["x"] for mark in value["marks"]}
    assert set(kinds) == {"checkpoint", "interrupted"}
    assert kinds["interrupted"] == pytest.approx(value["curves"]["train/loss"]["x"][-1], rel=1e-3)


@pytest.mark.parametrize(
    "query",
    [
        {"axis": "x"},
        {"metric": "x:1"},
        {"metric": "train/loss:x"},
        {"from": "x"},
        {"key": []},
        {"metric": "train/loss"},
    ],
)
def test_bad_query_is_refused(client: TestClient, root: Path, query: dict[str, Any]) -> None:
    make_run(root, "one", steps=5)
    assert client.get("/api/curves", params={"key": "local/one", **query}).status_code == 400


def test_why_has_cause_evidence_and_remedy(client: TestClient, root: Path) -> None:
    make_run(root, "bad", steps=70, state="failed")
    why = client.get("/api/why", params={"key": "local/bad"}).json()["why"]
    assert (why["cause"], why["what"]) == ("not_finite", "Loss is not finite in step 70.")
    assert "llmtrain train --resume" in why["remedy"]
    assert why["evidence"]
    make_run(root, "good", steps=5)
    assert client.get("/api/why", params={"key": "local/good"}).json() == {"why": None}


def test_why_names_silent_rank_of_running_run(root: Path) -> None:
    run = make_run(root, "stuck", steps=20, state="running", world_size=4)
    write_heartbeats(run, 4, 20, time.time(), silent=(2,))
    why = run_values.why(RunView(RunDirectory(run)))
    assert why is not None
    assert (why["cause"], len(why["evidence"])) == ("rank_silent", 1)
    assert "rank 2" in why["what"]


def test_details_have_checkpoints_commands_and_samples(client: TestClient, root: Path) -> None:
    make_run(root, "one", steps=100, world_size=2)
    details = client.get("/api/run", params={"key": "local/one"}).json()["details"]
    assert [(row["name"], row["is_best"], row["bytes"]) for row in details["checkpoints"]] == [
        ("step_50", False, 497_761_032),
        ("step_100", True, 497_761_032),
    ]
    assert [row["what"] for row in details["commands"]] == ["Generate text", "Export"]  # a resume would only say so
    assert details["logs"] == [0, 1]
    assert details["has_end_sample"]
    (sample,) = client.get("/api/samples", params={"key": "local/one", "step": "end"}).json()["samples"]
    assert sample == {"prompt": "Once upon a time", "answer": "there was a model that had finished."}
    (sample,) = client.get("/api/samples", params={"key": "local/one", "step": 100}).json()["samples"]
    assert HOSTILE in sample["answer"]
    config = client.get("/api/config", params={"key": "local/one"}).json()["config"]
    assert config["trainer.max_steps"] == 100
    make_run(root, "two", steps=70, state="failed")
    details = client.get("/api/run", params={"key": "local/two"}).json()["details"]
    assert [row["what"] for row in details["commands"]] == ["Resume", "Generate text", "Export"]
    assert not details["has_end_sample"]


# Logs.


def test_log_is_read_in_parts(client: TestClient, root: Path) -> None:
    make_run(root, "one", steps=5000)
    query = {"key": "local/one", "rank": 0}
    whole = (root / "one" / "logs" / "train.log").read_bytes()
    parts = [client.get("/api/log", params=query).json()]
    while parts[0]["begin"] > 0:
        parts.insert(0, client.get("/api/log", params={**query, "before": parts[0]["begin"]}).json())
    assert "".join(part["text"] for part in parts).encode() == whole
    assert len(parts) > 3
    assert max(len(part["text"]) for part in parts) <= log_file.CHUNK_BYTES
    again = client.get("/api/log", params={**query, "after": parts[2]["begin"]}).json()
    assert again["text"].startswith(parts[2]["text"][:1000])


def test_search_finds_lines_newest_first(client: TestClient, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "_BLOCK_BYTES", 1000)  # lines cross blocks
    make_run(root, "one", steps=3000)
    query = {"key": "local/one", "rank": 0}
    found = client.get("/api/log/search", params={**query, "text": "STEP 27"}).json()
    steps = [int(match["line"].split("step ")[1].split("/")[0]) for match in found["matches"]]
    assert steps == sorted((step for step in range(3000) if str(step).startswith("27")), reverse=True)
    assert found["is_complete"]
    chunk = client.get("/api/log", params={**query, "at": found["matches"][0]["offset"]}).json()
    assert chunk["text"].split("\n")[0] == found["matches"][0]["line"]
    many = client.get("/api/log/search", params={**query, "text": "step"}).json()
    assert len(many["matches"]) == log_file.MAX_MATCHES
    assert not many["is_complete"]


def test_rank_without_log_is_a_clear_answer(client: TestClient, root: Path) -> None:
    make_run(root, "one", steps=5)
    response = client.get("/api/log", params={"key": "local/one", "rank": 7})
    assert response.status_code == 404
    assert response.json()["remedy"]


# Increments.


def next_events(events: RunEvents) -> dict[str, Any]:
    return {name: (value, position) for name, value, position in events._next()}


def test_stream_sends_only_new_rows_and_resumes_by_offset(root: Path) -> None:
    run = make_run(root, "one", steps=50, state="running")
    catalog = RunCatalog(str(root))
    catalog.local.refresh()
    start = catalog.metrics("local/one").position
    events = RunEvents(catalog, ["local/one"], start, False, None)
    assert set(next_events(events)) == {"row", "details"}
    assert next_events(events) == {}
    write_rows(run, 51, 53, 0.0, 0.5, 6e-4, 1000)
    rows, position = next_events(events)["rows"]
    assert rows["train"]["step"] == [51, 52, 53]
    assert (rows["begin"], rows["end"]) == (int(start.split("-")[0]), int(position.split("-")[0]))
    write_rows(run, 54, 54, 0.0, 0.5, 6e-4, 1000)  # while the laptop is closed
    later = RunEvents(RunCatalog(str(root)), ["local/one"], position, False, None)  # and the server was restarted
    later._catalog.local.refresh()
    assert next_events(later)["rows"][0]["train"]["step"] == [54]


def test_stream_without_position_begins_at_end(root: Path) -> None:
    run = make_run(root, "one", steps=50, state="running")
    catalog = RunCatalog(str(root))
    events = RunEvents(catalog, ["local/one"], "", False, None)
    assert "rows" not in next_events(events)
    write_rows(run, 51, 51, 0.0, 0.5, 6e-4, 1000)
    assert next_events(events)["rows"][0]["train"]["step"] == [51]


def test_stream_sends_reset_after_too_many_rows_and_replaced_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "one", steps=50, state="running", extras=False)
    catalog = RunCatalog(str(root))
    events = RunEvents(catalog, ["local/one"], catalog.metrics("local/one").position, False, None)
    next_events(events)
    monkeypatch.setattr(stream, "MAX_NEW_BYTES", 2000)
    write_rows(run, 51, 90, 0.0, 0.5, 6e-4, 1000)
    assert "reset" in next_events(events)
    assert next_events(events) == {}
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text()[:-3000])
    assert "reset" in next_events(events)


def test_stream_reports_run_that_disappears_once_and_keeps_others(root: Path) -> None:
    gone, kept = make_run(root, "gone", steps=5), make_run(root, "kept", steps=5, state="running")
    catalog = RunCatalog(str(root))
    events = RunEvents(catalog, ["local/gone", "local/kept"], "", False, None)
    next_events(events)
    shutil.rmtree(gone)
    write_rows(kept, 6, 6, 0.0, 0.5, 6e-4, 1000)
    found = next_events(events)
    assert found["problem"][0]["key"] == "local/gone"
    assert found["rows"][0]["train"]["step"] == [6]
    assert next_events(events) == {}


def test_stream_sends_row_of_unchanged_run_that_returns(root: Path) -> None:
    """Only a row clears the notice that the run is not here."""
    run = make_run(root, "one", steps=5)
    catalog = RunCatalog(str(root))
    events = RunEvents(catalog, ["local/one"], "", False, None)
    row = next_events(events)["row"][0]
    for hidden in (run, root):
        away = hidden.with_name("away")
        hidden.rename(away)
        catalog.local._refreshed_at = -local_runs.REFRESH_SEC
        assert "problem" in next_events(events)
        away.rename(hidden)
        catalog.local._refreshed_at = -local_runs.REFRESH_SEC
        assert next_events(events)["row"][0] == row
        assert next_events(events) == {}


def test_stream_follows_log_by_offset(root: Path) -> None:
    run = make_run(root, "one", steps=5, state="running")
    catalog = RunCatalog(str(root))
    log = run / "logs" / "train.log"
    events = RunEvents(catalog, ["local/one"], f";{log.stat().st_size}", False, 0)
    assert "log" not in next_events(events)
    with log.open("a") as file:
        file.write(f"one {HOSTILE}\ntwo\nincompl")
    chunk, position = next_events(events)["log"]
    assert chunk["text"] == f"one {HOSTILE}\ntwo\n"
    assert position.endswith(f";{chunk['end']}")


def test_ranks_are_compact(root: Path) -> None:
    run = make_run(root, "big", steps=20, state="running", world_size=512)
    events = RunEvents(RunCatalog(str(root)), ["local/big"], "", True, None)
    ranks = next_events(events)["ranks"][0]
    assert ranks["rank"] == list(range(512))
    assert len(ranks["hosts"]) == 64
    assert len(json.dumps(ranks, separators=(",", ":"))) < 16_000
    assert run.exists()


def test_stream_over_http_has_ids(root: Path, serve_page: Callable[..., Any]) -> None:
    import httpx2

    make_run(root, "one", steps=5, state="running")
    page = serve_page(root)
    with httpx2.Client(base_url=page.base) as client:
        client.get("/", params={"token": page.access.token})
        query = {"view": "run", "key": "local/one", "from": "0-0"}
        with client.stream("GET", "/api/stream", params=query, timeout=limit(10)) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = _until_event(response.iter_lines(), "rows")
        position = page.catalog.metrics("local/one").position
        assert f"id: {position}" in lines
        write_rows(root / "one", 6, 6, 0.0, 0.5, 6e-4, 1000)
        headers = {"last-event-id": position}  # as a browser that reconnects sends it
        with client.stream("GET", "/api/stream", params=query, headers=headers, timeout=limit(10)) as response:
            later = _until_event(response.iter_lines(), "rows")
    data = next(line for line, before in zip(later[1:], later, strict=False) if before == "event: rows")
    assert json.loads(data.removeprefix("data: "))["train"]["step"] == [6]


def _until_event(lines: Iterator[str], event: str) -> list[str]:
    seen = []
    for line in lines:
        seen.append(line)
        if f"event: {event}" in seen and line == "":
            return seen
    raise AssertionError(f"the stream ended without {event}")


# Actions.


def test_actions_need_permission_csrf_token_and_name(root: Path) -> None:
    make_run(root, "one", steps=5)
    client = client_of(root, allow_actions=True)
    csrf = client.get("/api/session").json()["csrf"]
    body = {"key": "local/one", "action": "delete", "confirm": "one"}
    good = {"origin": BASE, CSRF_HEADER: csrf}
    for headers in (
        {},
        {"origin": BASE},
        {CSRF_HEADER: csrf},
        {**good, CSRF_HEADER: "x"},
        {**good, "origin": "http://a.example"},
    ):
        assert client.post("/api/actions", json=body, headers=headers).status_code == 403, headers
    for change in ({"confirm": "two"}, {"action": "stop"}, {"action": "rm"}):
        assert client.post("/api/actions", json={**body, **change}, headers=good).status_code == 400, change
    assert client.post("/api/actions", content=b"[]", headers=good).status_code == 400
    assert client.post("/api/actions", json={**body, "more": "x" * 20_000}, headers=good).status_code == 413
    assert client.post("/api/actions", json={**body, "key": "local/two"}, headers=good).status_code == 404
    assert (root / "one").exists()


def test_possible_actions_are_listed_only_with_permission(root: Path, client: TestClient) -> None:
    make_run(root, "one", steps=5, state="interrupted")
    assert client.get("/api/run", params={"key": "local/one"}).json()["actions"] == []
    allowed = client_of(root, allow_actions=True)
    assert allowed.get("/api/run", params={"key": "local/one"}).json()["actions"] == ["resume", "delete"]


def test_delete_removes_run_with_real_command(root: Path) -> None:
    make_run(root, "one", steps=5)
    make_run(root, "two", steps=5)
    client = client_of(root, allow_actions=True)
    headers = {"origin": BASE, CSRF_HEADER: client.get("/api/session").json()["csrf"]}
    body = {"key": "local/one", "action": "delete", "confirm": "one"}
    response = client.post("/api/actions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert not (root / "one").exists()
    assert (root / "two").exists()


def test_stop_sends_sigterm_to_owner_of_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(root, "one", steps=5)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    client = client_of(root, allow_actions=True)
    headers = {"origin": BASE, CSRF_HEADER: client.get("/api/session").json()["csrf"]}
    body = {"key": "local/one", "action": "stop", "confirm": "one"}
    (run / "finished.json").unlink()
    hold_lock(run)  # by another machine
    assert client.post("/api/actions", json=body, headers=headers).status_code == 400
    (run / "lock").unlink()
    with RunLock(run / "lock"):
        assert client.post("/api/actions", json=body, headers=headers).status_code == 200
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_resume_starts_command_in_its_own_session(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of Python notes how it was started, and takes the lock as training does."""
    run, notes = make_run(root, "one", steps=5, state="interrupted"), tmp_path / "notes"
    program = tmp_path / "python"
    lock = json.dumps({"token": "x", "pid": 1, "host": "other", "boot": "other", "namespace": "other"})
    program.write_text(
        f'#!/bin/sh\necho "$@" > {notes}\nps -o sid= -p $$ >> {notes}\necho $$ >> {notes}\n'
        f"echo '{lock}' > {run}/lock\nread wait < {tmp_path}/end\n"
    )
    program.chmod(0o700)
    os.mkfifo(tmp_path / "end")
    monkeypatch.setattr(actions.sys, "executable", str(program))
    client = client_of(root, allow_actions=True)
    headers = {"origin": BASE, CSRF_HEADER: client.get("/api/session").json()["csrf"]}
    body = {"key": "local/one", "action": "resume", "confirm": "one"}
    response = client.post("/api/actions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    words, session, pid = notes.read_text().split("\n")[:3]
    assert words.split() == ["-m", "llmtrain", "train", "--resume", str(run)]
    assert session.strip() == pid
    assert client.post("/api/actions", json=body, headers=headers).status_code == 400  # it is running
    (tmp_path / "end").write_text("\n")


def test_resume_that_fails_says_why(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(root, "one", steps=5, state="interrupted")
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'error: the checkpoint is damaged' >&2\nexit 65\n")
    program.chmod(0o700)
    monkeypatch.setattr(actions.sys, "executable", str(program))
    client = client_of(root, allow_actions=True)
    headers = {"origin": BASE, CSRF_HEADER: client.get("/api/session").json()["csrf"]}
    body = {"key": "local/one", "action": "resume", "confirm": "one"}
    response = client.post("/api/actions", json=body, headers=headers)
    assert response.status_code == 400
    assert "the checkpoint is damaged" in response.json()["remedy"]


@pytest.mark.slow
def test_interrupted_run_is_resumed_and_stopped_again(
    tiny: list[str], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_runs, "REFRESH_SEC", 0.0)
    sets = [part for text in (*tiny, "output.run_id=one", "trainer.max_steps=1000000") for part in ("--set", text)]
    client = client_of(workdir / "runs", allow_actions=True)
    headers = {"origin": BASE, CSRF_HEADER: client.get("/api/session").json()["csrf"]}

    def act(action: str) -> None:
        body = {"key": "local/one", "action": action, "confirm": "one"}
        response = client.post("/api/actions", json=body, headers=headers)
        assert response.status_code == 200, response.text

    def until(state: str, step: int) -> int:
        def reached() -> int:
            row = rows_of(client).get("one", {"state": "", "step": 0})
            return int(row["step"]) if row["state"] == state and row["step"] > step else 0

        return wait_until(reached, 200)

    with subprocess.Popen([sys.executable, "-m", "llmtrain", "train", "--config", "gpt_smoke", *sets]) as process:
        until("running", 4)
        act("stop")
    assert process.returncode == 75
    first = until("interrupted", 4)
    act("resume")
    until("running", first)
    act("stop")
    until("interrupted", first)


# The command.


def test_command_refuses_other_host_without_tls(cli: Callable[..., Any]) -> None:
    assert cli("page", "--host", "0.0.0.0", "--no-open").code == 64
    assert cli("page", "--certfile", "x.pem", "--no-open").code == 64
    assert cli("page", "--certfile", "x.pem", "--keyfile", "y.pem", "--no-open").code == 64


def test_command_reports_port_in_use(cli: Callable[..., Any], serve_page: Callable[..., Any], tmp_path: Path) -> None:
    port = serve_page(tmp_path).access.port
    done = cli("page", "--port", port, "--no-open")
    assert done.code == 69
    assert str(port) in done.err


def test_command_prints_url_as_json(tmp_path: Path) -> None:
    words = ("page", "--json", "--no-open", "--no-cluster", "--port", "0", "--root", str(tmp_path))
    command = subprocess.Popen(
        [sys.executable, "-m", "llmtrain", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
    )
    try:
        assert command.stdout
        value = json.loads(command.stdout.readline())
        assert value.keys() == {"url", "port", "root", "allow_actions"}
        assert value["port"] > 0
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert browser.open(value["url"], timeout=limit(60)).status == 200
        command.send_signal(signal.SIGTERM)
        assert command.stdout.read() == "", "one object"
        assert command.wait(60) == 0
    finally:
        command.kill()
        command.wait()


def test_command_without_extra_names_it(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *words: None if name == "uvicorn" else found(name, *words)
    )
    done = cli("page", "--no-open")
    assert done.code == 64
    assert install_command("page") in done.err


def test_command_without_browser_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import webbrowser

    import uvicorn

    from llmtrain.page.serve import ServeOptions, serve

    opened: list[str] = []
    has_asked = threading.Event()

    def open_browser(url: str) -> bool:
        path = Path(url.removeprefix("file://"))
        opened.append(path.read_text())
        assert path.stat().st_mode & 0o077 == 0  # the token is not for others
        has_asked.set()
        return False

    def run(self: uvicorn.Server, sockets: list[Any]) -> None:  # noqa: ARG001
        has_asked.wait(limit(20))
        signal.raise_signal(signal.SIGTERM)  # which the server raises again at its end

    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.BackgroundBrowser("none"))
    monkeypatch.setattr(webbrowser, "open", open_browser)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    serve(ServeOptions(str(root), "127.0.0.1", 0, None, None, True, False), None)
    assert signal.getsignal(signal.SIGTERM) is before
    out, _ = capsys.readouterr()
    assert out.split()[-1] in opened[0]
    assert list(tmp_path.glob("*.html")) == []  # it contains the token


def test_browser_of_the_terminal_is_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import webbrowser

    from llmtrain.page.serve import _open_browser

    opened: list[str] = []
    monkeypatch.delenv("BROWSER", raising=False)
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("w3m"))
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    _open_browser(tmp_path)
    _open_browser(None)  # the file could not be written
    assert opened == []
    assert capsys.readouterr().err.count("browser") == 2
    monkeypatch.setenv("BROWSER", "w3m")
    _open_browser(tmp_path)
    assert len(opened) == 1


def test_streams_end_with_the_server(root: Path) -> None:
    make_run(root, "one", steps=5)
    catalog = RunCatalog(str(root))

    async def read_all() -> int:
        streams = stream.ListEvents(catalog, "").stream(), RunEvents(catalog, ["local/one"], "", False, None).stream()
        return sum([len([event async for event in each]) for each in streams])

    catalog.is_closing = True
    assert anyio.run(read_all) == 0


def test_slow_reading_delays_only_its_own_key() -> None:
    shared, is_waiting, may_end = Shared(60.0), threading.Event(), threading.Event()

    def read_slowly() -> str:
        is_waiting.set()
        may_end.wait(limit(20))
        return "slow"

    thread = threading.Thread(target=shared.get, args=("slow", read_slowly))
    thread.start()
    is_waiting.wait(limit(20))
    assert shared.get("fast", lambda: "fast") == "fast"
    may_end.set()
    thread.join()
    assert shared.get("slow", lambda: "again") == "slow"


def test_command_continues_without_usable_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llmtrain.commands.page import _cluster
    from llmtrain.core.arguments import ClusterPlace
    from llmtrain.errors import UsageError

    broken = tmp_path / "kubeconfig"
    broken.write_text("{}")
    monkeypatch.setenv("KUBECONFIG", str(broken))
    assert _cluster(ClusterPlace()) is None
    with pytest.raises(UsageError):
        _cluster(ClusterPlace(context="prod"))


def test_command_serves_until_sigterm_and_leaks_no_token(root: Path, tmp_path: Path) -> None:
    """Started as by `nohup llmtrain page &` in a script."""
    import urllib.error
    import urllib.request

    make_run(root, "one", steps=5)
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [sys.executable, "-m", "llmtrain", "page", "--root", str(root), "--port", "0", "--no-open"]
    process = subprocess.Popen([*IN_BACKGROUND, *command], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout
        url = process.stdout.readline().split()[-1]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url.split("?")[0])
        assert refused.value.code == 401
        assert urllib.request.urlopen(url).status == 200
        for ignored in (signal.SIGINT, signal.SIGHUP):
            process.send_signal(ignored)
        time.sleep(limit(0.5))  # for a server that would end now
        assert urllib.request.urlopen(url).status == 200
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=limit(30))
    finally:
        process.kill()
        process.wait()
    assert url.split("token=")[1] not in rest
    assert (tmp_path / "state" / "llmtrain" / "page-session-key").stat().st_mode & 0o777 == 0o600


def test_local_runs_ignores_what_is_not_a_run(root: Path) -> None:
    make_run(root, "one", steps=5)
    (root / "empty").mkdir()
    (root / "file").write_text("")
    (root / "Bad Name").mkdir()
    (root / "link").symlink_to(root / "nowhere")
    runs = LocalRuns(str(root))
    runs.refresh()
    assert [row["run_id"] for row in runs.table.since(0)["rows"]] == ["one"]
    assert runs.find("../runs/one") is None
    with pytest.raises(NotFound):
        RunCatalog(str(root)).view("local/two")
