"""LLMTRAIN_LAUNCH: crashes are counted per launch, so that a new launch starts from 0."""

import json
from pathlib import Path

import pytest

from llmtrain.core.env import LAUNCH
from llmtrain.errors import TrainingFailed
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.generations import MAX_CRASHES, begin_generation, end_generation, read_generations


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "some-run")
    run.path.mkdir()
    return run


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH, raising=False)


def begin(run: RunDirectory, from_step: int = 4, *, is_unattended: bool = True) -> int:
    return begin_generation(run, from_step, 2, is_unattended)


def crash(run: RunDirectory, times: int = MAX_CRASHES) -> None:
    for _ in range(times):
        begin(run)


def test_new_launch_resets_the_count(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 4):
        monkeypatch.setenv(LAUNCH, str(number))
        crash(run)
        with pytest.raises(TrainingFailed, match="crashed 3 times"):
            begin(run)
        with pytest.raises(TrainingFailed):
            begin(run)
    rows = read_generations(run)
    assert [row["launch"] for row in rows] == [number for number in "123" for _ in range(MAX_CRASHES)]
    assert [row["crashes"] for row in rows] == list(range(MAX_CRASHES)) * 3
    assert [row["generation"] for row in rows] == list(range(1, len(rows) + 1)), "numbers continue"


def test_count_continues_within_a_launch(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "2")
    crash(run, 2)
    assert read_generations(run)[-1]["crashes"] == 1
    end_generation(run, begin(run), "failed", 4)
    with pytest.raises(TrainingFailed):
        begin(run)


def test_remedy_is_the_resume_command(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    crash(run)
    with pytest.raises(TrainingFailed) as here:
        begin(run)
    assert f"llmtrain train --resume {run.path}" in str(here.value.remedy)
    monkeypatch.setenv(LAUNCH, "1")
    crash(run)
    with pytest.raises(TrainingFailed) as there:
        begin(run)
    assert f"llmtrain resume {run.run_id}" in str(there.value.remedy)


def test_moving_between_cluster_and_machine_resets_the_count(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(run)
    monkeypatch.setenv(LAUNCH, "1")
    begin(run)
    assert read_generations(run)[-1]["crashes"] == 0
    monkeypatch.delenv(LAUNCH)
    begin(run)
    assert read_generations(run)[-1]["crashes"] == 0


def test_rows_without_launch(run: RunDirectory) -> None:
    crash(run)
    rows = json.loads(run.generations.read_text())
    run.generations.write_text(json.dumps([{k: v for k, v in row.items() if k != "launch"} for row in rows]))
    with pytest.raises(TrainingFailed):
        begin(run)


def test_attended_start_is_never_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "1")
    crash(run)
    assert begin(run, is_unattended=False) == MAX_CRASHES + 1


def test_newer_checkpoint_resets_the_count_within_a_launch(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH, "1")
    for step in range(3 * MAX_CRASHES):
        begin(run, step)
    crash(run, 1)
