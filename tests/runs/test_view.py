"""RunView: one word for the state of a run, in the list, on the page and in `why`."""

from pathlib import Path
from typing import Any

import pytest

from demo_runs import make_run
from llmtrain.commands.run_tables import run_table
from llmtrain.page.run_values import run_row
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.explain import explain_local
from llmtrain.runs.listing import describe, summarize
from llmtrain.runs.state import RunState
from llmtrain.runs.view import RunView

STATES = ("finished", "running", "interrupted", "failed", "killed")


@pytest.mark.parametrize("state", STATES)
def test_list_page_and_why_say_the_same_state(tmp_path: Path, state: str) -> None:
    run = RunDirectory(make_run(tmp_path, "one", steps=20, state=state))
    assert RunView(run).state == RunState(state)
    assert summarize(RunView(run))["status"] == state
    assert describe(RunView(run))["status"] == state
    assert run_row(RunView(run))["state"] == state
    assert explain_local(RunView(run)).state == state


def test_directory_without_a_start_is_not_started(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new")
    run.checkpoints.mkdir(parents=True)
    assert RunView(run).state == RunState.NOT_STARTED
    assert explain_local(RunView(run)).cause == "not_started"
    run.metrics.write_text('{"step": 3, "train/loss": 1.0}\n')  # of a version that recorded no starts
    assert RunView(run).state == RunState.KILLED


def test_refused_start_is_failed(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path, "one", steps=5, state="failed"))
    run.generations.write_text(run.generations.read_text().replace('"failed"', '"refused"'))
    assert RunView(run).state == RunState.FAILED


def test_killed_run_is_shown_with_its_newest_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path, "one", steps=20, state="killed"))
    row = summarize(RunView(run))
    assert (row["status"], row["latest"]) == ("killed", "step_20")
    assert "killed (step_20)" in run_table([row])
    assert "step_20" in run_row(RunView(run))["why"]
    why = explain_local(RunView(run))
    assert why.cause == "killed"
    assert "step_20" in why.evidence[-1]
    assert f"--resume {run.path}" in why.remedy


def test_list_and_page_agree_on_step_and_length(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path, "one", steps=20, max_steps=50, state="interrupted"))
    summary, row = summarize(RunView(run)), run_row(RunView(run))
    assert (summary["step"], summary["max_steps"]) == (row["step"], row["max_steps"]) == (20, 50)
    run.generations.unlink()
    assert RunView(run).max_steps == 50  # of the config


@pytest.mark.parametrize(("state", "cause"), [("failed", "not_finite"), ("interrupted", "interrupted")])
def test_why_reads_the_exit_report(tmp_path: Path, state: str, cause: str) -> None:
    why = explain_local(RunView(RunDirectory(make_run(tmp_path, "one", steps=20, state=state))))
    assert why.cause == cause
    assert "llmtrain train --resume" in why.remedy
    assert any("Exit code" in line for line in why.evidence)


def test_why_command_explains_a_local_run(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run = make_run(tmp_path, "one", steps=20, state="failed")
    by_id = cli("why", "one", "--root", tmp_path, "--json")
    by_path = cli("why", run, "--json")
    assert (by_id.code, by_path.code) == (0, 0)
    assert by_id.json == by_path.json
    assert (by_id.json["run_id"], by_id.json["state"], by_id.json["cause"]) == ("one", "failed", "not_finite")


def test_why_looks_for_a_launched_run_on_the_cluster(tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy in the directory may be older than the run."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    run = RunDirectory(make_run(tmp_path, "one", steps=20, state="killed"))
    run.generations.write_text(run.generations.read_text().replace('"crashes"', '"launch": "abc", "crashes"'))
    assert cli("why", "one", "--root", tmp_path).code == 64  # there is no cluster
    assert cli("why", run.path, "--json").json["cause"] == "killed"
