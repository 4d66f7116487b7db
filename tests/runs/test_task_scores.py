"""Scores on tasks in the run directory, and what reads them."""

from pathlib import Path
from typing import Any

from llmtrain.page.run_values import run_details
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.listing import summarize
from llmtrain.runs.task_scores import newest_task_scores, scored_steps, task_scores_at, write_task_scores
from llmtrain.runs.view import RunView


def score(acc: float) -> dict[str, Any]:
    return {"version": "1.0", "few_shot": 0, "items": 4, "sha256": "ab", "metrics": {"acc": acc}}


def make_run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "demo")
    run.path.mkdir()
    return run


def test_scores_of_a_step_are_added_and_the_newest_count(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_task_scores(run, 10, {"one": score(0.25), "two": score(0.5)})
    write_task_scores(run, 2, {"one": score(0.75)})
    write_task_scores(run, 10, {"three": score(1.0)})
    assert scored_steps(run) == [2, 10]
    assert set(task_scores_at(run, 10)) == {"one", "two", "three"}
    assert newest_task_scores(run) == {"one/acc": 0.25, "two/acc": 0.5, "three/acc": 1.0}
    view = RunView(run)
    assert summarize(view)["task_scores"] == newest_task_scores(run)
    assert run_details(view)["task_scores"] == [
        {"step": 2, "values": {"one/acc": 0.75}},
        {"step": 10, "values": {"one/acc": 0.25, "two/acc": 0.5, "three/acc": 1.0}},
    ]


def test_damaged_files_have_no_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert scored_steps(run) == []
    write_task_scores(run, 2, {"one": score(0.75)})
    for number, text in enumerate(("", "[]", '{"one": 3}', '{"one": {"metrics": {"acc": "x"}}}', "\0")):
        (run.task_scores / f"step_{number + 10}.json").write_text(text)
    (run.task_scores / "other.txt").write_text("")
    assert newest_task_scores(run) == {"one/acc": 0.75}
    assert run_details(RunView(run))["task_scores"][0]["values"] == {"one/acc": 0.75}
