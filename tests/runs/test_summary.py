"""Damaged files of one run are listed in its row, and do not hide other runs."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.runs.compare import compare
from llmtrain.runs.directory import RunDirectory, list_runs
from llmtrain.runs.listing import describe, summarize_all
from llmtrain.runs.view import RunView

DEEP = "[" * 100_000


def write(name: str, content: str | bytes) -> Callable[[RunDirectory], None]:
    def damage(run: RunDirectory) -> None:
        data = content.encode() if isinstance(content, str) else content
        (run.path / name).write_bytes(data)

    return damage


def make_directory(name: str) -> Callable[[RunDirectory], None]:
    def damage(run: RunDirectory) -> None:
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).mkdir()

    return damage


def make_pipe(name: str) -> Callable[[RunDirectory], None]:
    def damage(run: RunDirectory) -> None:
        (run.path / name).unlink(missing_ok=True)
        os.mkfifo(run.path / name)

    return damage


DAMAGE = {
    "config binary": ("config.yaml", write("config.yaml", b"\xff\xfe\x00")),
    "config deep": ("config.yaml", write("config.yaml", f"a: {DEEP}")),
    "config trainer": ("config.yaml", write("config.yaml", "trainer: 3")),
    "config list": ("config.yaml", write("config.yaml", "[1]")),
    "meta list": ("meta.json", write("meta.json", "[]")),
    "meta deep": ("meta.json", write("meta.json", DEEP)),
    "meta text": ("meta.json", write("meta.json", "{")),
    "finished list": ("finished.json", write("finished.json", "[1]")),
    "finished directory": ("finished.json", make_directory("finished.json")),
    "lock list": ("lock", write("lock", "[1]")),
    "lock text": ("lock", write("lock", '"me"')),
    "loss text": ("metrics.jsonl", write("metrics.jsonl", '{"step": 1, "train/loss": "low", "val/loss": []}\n')),
    "metrics directory": ("metrics.jsonl", make_directory("metrics.jsonl")),
    "metrics deep": (None, write("metrics.jsonl", f'{{"step": 1, "x": {DEEP}\n')),
    "metrics pipe": ("metrics.jsonl", make_pipe("metrics.jsonl")),
    "finished pipe": ("finished.json", make_pipe("finished.json")),
    "config pipe": ("config.yaml", make_pipe("config.yaml")),
    "lock pipe": ("lock", make_pipe("lock")),
    "best pipe": (None, make_pipe("checkpoints/best")),
    "generations values": (
        None,
        write(
            "generations.json",
            '[{"generation": 1, "from_step": 0, "crashes": 0, "threads": [1], "architecture": {}, "to_step": []}]',
        ),
    ),
    "best binary": (None, write("checkpoints/best", b"\xff\xfe")),
    "generations": (None, write("generations.json", '{"a": 1}')),
    "heartbeat": (None, write("heartbeats/rank-0.json", "[]")),
}


def make_run(path: Path) -> RunDirectory:
    run = RunDirectory(path)
    for directory in (run.checkpoints, run.heartbeats):
        directory.mkdir(parents=True)
    run.meta.write_text('{"name": "x"}')
    run.config.write_text("trainer: {max_steps: 3}\n")
    run.metrics.write_text('{"step": 3, "train/loss": 1.5, "val/loss": 2.5}\n')
    return run


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        pytest.param(*damage, id=name, marks=pytest.mark.slow if name == "config deep" else ())
        for name, damage in DAMAGE.items()
    ],
)
def test_damaged_run_does_not_hide_others(
    tmp_path: Path, file: str | None, damage: Callable[[RunDirectory], None]
) -> None:
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad")
    damage(bad)
    rows = {row["run_id"]: row for row in summarize_all(list_runs(str(tmp_path)))}
    assert rows["good"]["damaged"] == []
    assert (rows["good"]["step"], rows["good"]["max_steps"], rows["good"]["val_loss"]) == (3, 3, 2.5)
    assert rows["bad"]["damaged"] == ([file] if file else [])
    assert describe(RunView(bad))["run_id"] == "bad"
    assert compare([good, bad])["runs"][0]["run_id"] == "good"


def test_deleted_run_has_no_row(tmp_path: Path) -> None:
    run = make_run(tmp_path / "good")
    assert summarize_all([run, RunDirectory(tmp_path / "gone")])[0]["run_id"] == "good"
    assert len(summarize_all([run, RunDirectory(tmp_path / "gone")])) == 1


MAX_CALLS = 20_000
"""Function calls to summarize a run: about 10,000. Parsing its config in Python takes 120,000; 1,000 runs took 30 s."""


@pytest.mark.skipif(not hasattr(yaml, "CSafeLoader"), reason="PyYAML was built without libyaml")
def test_many_runs_are_summarized_with_few_calls(repo: Path, tmp_path: Path) -> None:
    count = 20
    for number in range(count):
        shutil.copytree(repo / "tests/first_version/runs/gpt", tmp_path / f"copy-{number}")
    runs = list_runs(str(tmp_path))
    summarize_all(runs[:1])  # imports
    calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:  # noqa: ARG001
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_call)
    try:
        rows = summarize_all(runs)
    finally:
        sys.setprofile(before)
    assert len(rows) == count
    assert {(row["lr"], row["model"], row["max_steps"]) for row in rows} == {(0.003, "gpt", 12)}
    assert calls / count < MAX_CALLS
