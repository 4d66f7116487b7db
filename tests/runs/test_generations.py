"""generations.json, exit reports for the agent, and taking over a run with a new generation."""

import json
from pathlib import Path

import pytest

from llmtrain.errors import CheckpointError, ConfigError, Interrupted, PeerLost, Superseded, TrainingFailed, UsageError
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.exit_report import ERROR_FILE, forget_earlier_run, write_exit_report
from llmtrain.runs.generations import MAX_CRASHES, MAX_GENERATIONS, begin_generation, end_generation, read_generations
from llmtrain.runs.lock import RunLock, is_held


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "some-run")
    run.path.mkdir()
    return run


def begin(run: RunDirectory, from_step: int = 0, is_unattended: bool = True) -> int:
    return begin_generation(run, from_step, 2, is_unattended)


def test_generations_are_numbered_with_status(run: RunDirectory) -> None:
    assert begin(run) == 1
    (row,) = read_generations(run)
    assert (row["ended"], row["world_size"], row["from_step"], row["crashes"]) == (None, 2, 0, 0)
    end_generation(run, 1, "stopped", 5)
    assert begin(run, 5) == 2
    end_generation(run, 2, "finished", 8)
    assert [(row["generation"], row["ended"], row["step"]) for row in read_generations(run)] == [
        (1, "stopped", 5),
        (2, "finished", 8),
    ]


def test_three_crashes_without_progress_give_up(run: RunDirectory) -> None:
    for number in range(MAX_CRASHES):
        assert begin(run, 4) == number + 1
    before = run.generations.read_bytes()
    with pytest.raises(TrainingFailed, match=r"crashed 3 times in a row.* step 4") as caught:
        begin(run, 4)
    assert caught.value.exit_code == 65
    assert str(run.path) in str(caught.value.remedy)
    assert run.generations.read_bytes() == before, "giving up adds no generation"
    with pytest.raises(TrainingFailed):
        begin(run, 4)


@pytest.mark.parametrize("ended", ["failed", None, "superseded"])
def test_ends_that_count_as_crash(run: RunDirectory, ended: str | None) -> None:
    for _ in range(MAX_CRASHES):
        number = begin(run)
        if ended:
            end_generation(run, number, ended, 0)
    with pytest.raises(TrainingFailed):
        begin(run)


@pytest.mark.parametrize("ended", ["stopped", "finished"])
def test_ends_that_do_not_count_as_crash(run: RunDirectory, ended: str) -> None:
    """A pod that is preempted ten times in a row has not crashed."""
    for _ in range(3 * MAX_CRASHES):
        end_generation(run, begin(run), ended, 0)


def test_newer_checkpoint_resets_the_count(run: RunDirectory) -> None:
    for step in range(3 * MAX_CRASHES):
        begin(run, step)
    assert read_generations(run)[-1]["crashes"] == 0


def test_interruption_resets_the_count(run: RunDirectory) -> None:
    for _ in range(2 * MAX_CRASHES):
        begin(run)
        end_generation(run, begin(run), "stopped", 0)


def test_older_checkpoint_is_not_progress(run: RunDirectory) -> None:
    for step in (6, 4, 2):
        begin(run, step)
    with pytest.raises(TrainingFailed):
        begin(run, 0)


def test_attended_start_resets_the_count(run: RunDirectory) -> None:
    for _ in range(2 * MAX_CRASHES):
        begin(run, 4, is_unattended=False)
    assert begin(run, 4) == 2 * MAX_CRASHES + 1
    assert read_generations(run)[-1]["crashes"] == 1


def test_number_of_generations_is_limited(run: RunDirectory) -> None:
    for _ in range(MAX_GENERATIONS + 20):
        end_generation(run, begin(run), "stopped", 0)
    rows = read_generations(run)
    assert len(rows) == MAX_GENERATIONS
    assert rows[-1]["generation"] == MAX_GENERATIONS + 20


def test_end_of_older_generation_changes_only_its_row(run: RunDirectory) -> None:
    begin(run)
    begin(run)
    end_generation(run, 1, "failed", 3)
    assert [row["ended"] for row in read_generations(run)] == ["failed", None]


@pytest.mark.parametrize("content", ["", "{", "{}", "[1, null]", "null"])
def test_damaged_file_is_ignored(run: RunDirectory, content: str) -> None:
    run.generations.write_text(content)
    assert read_generations(run) == []
    assert begin(run) == 1


@pytest.mark.parametrize(
    "content", ['[{"generation": "x"}]', '[{"ended": null}]', '[{"generation": 1, "crashes": "x"}]']
)
def test_damaged_rows_are_ignored(run: RunDirectory, content: str) -> None:
    run.generations.write_text(content)
    assert begin(run) >= 1


# How a process ended, for its launcher


@pytest.mark.parametrize(
    "error",
    [
        UsageError("wrong.", known=["a"], remedy="Do it."),
        ConfigError("c.yaml", ["one", "two"]),
        CheckpointError("torn."),
        Interrupted("interrupted."),
        PeerLost("gone."),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exit_report_for_the_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: UsageError) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    forget_earlier_run()
    write_exit_report(error)
    report = json.loads((tmp_path / "error.json").read_text())
    assert report["llmtrain"] == error.as_dict()
    # The fields that torch's elastic agent reads:
    assert report["message"]["message"] == f"{type(error).__name__}: {error}"
    assert int(report["message"]["extraInfo"]["timestamp"]) > 0
    assert "py_callstack" in report["message"]["extraInfo"]


def test_no_exit_report_without_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    write_exit_report(Interrupted("interrupted."))
    assert list(tmp_path.iterdir()) == []


def test_unwritable_exit_report_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "nowhere" / "error.json"))
    write_exit_report(Interrupted("interrupted."))
    assert not (tmp_path / "nowhere").exists()


# A launcher's new generation supersedes a living owner


def test_new_generation_takes_over_from_live_owner(run: RunDirectory) -> None:
    with RunLock(run.lock) as old:
        with pytest.raises(UsageError), RunLock(run.lock):
            pytest.fail("two writers")
        with RunLock(run.lock, supersede=True) as new:
            assert is_held(run.lock)
            new.check()
            with pytest.raises(Superseded) as caught:
                old.check()
            assert caught.value.exit_code == 75
            assert new.token != old.token
            old.__exit__(None, None, None)
            new.check()
            assert json.loads(run.lock.read_text())["token"] == new.token
        assert not run.lock.exists()


def test_supersede_without_owner_takes_the_lock(run: RunDirectory) -> None:
    with RunLock(run.lock, supersede=True) as lock:
        lock.check()
