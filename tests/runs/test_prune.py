"""`runs prune` deletes what matches, never a run that is written or needed."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.core.files import file_sha256
from llmtrain.errors import UsageError
from llmtrain.runs.checksums import CHECKSUMS, checksums_text
from llmtrain.runs.directory import RunDirectory
from llmtrain.runs.lock import RunLock
from llmtrain.runs.prune import parse_age

MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(workdir: Path) -> MakeRun:
    """Runs in runs/, each older than the next by an hour."""
    made: list[str] = []

    def make(run_id: str, *, ended: str | None = "finished", steps: tuple[int, ...] = (1, 2, 3)) -> RunDirectory:
        run = RunDirectory(workdir / "runs" / run_id)
        for step in steps:
            folder = run.checkpoints / f"step_{step}"
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(b"x" * 1000)
            files = {"model.safetensors": {"bytes": 1000, "sha256": file_sha256(folder / "model.safetensors")}}
            (folder / CHECKSUMS).write_text(checksums_text(files))
        run.path.mkdir(parents=True, exist_ok=True)
        if steps:
            (run.checkpoints / "latest").write_text(f"step_{steps[-1]}\n")
            (run.checkpoints / "best").write_text(f"step_{steps[0]}\n")
        run.meta.write_text("{}")
        run.metrics.write_text('{"step": 1}\n')
        if ended == "finished":
            run.finished.write_text("{}")
        row = {"generation": 1, "from_step": 0, "crashes": 0, "ended": ended}
        run.generations.write_text(json.dumps([row]))
        made.append(run_id)
        at = time.time() - 100 * 3600 + len(made) * 3600
        for path in (run.meta, run.metrics):
            os.utime(path, (at, at))
        return run

    return make


def left(workdir: Path) -> set[str]:
    return {path.name for path in (workdir / "runs").iterdir()}


def test_without_yes_nothing_is_deleted(cli, make_run: MakeRun, workdir: Path) -> None:
    make_run("old")
    done = cli("runs", "prune", "old", "--json")
    assert done.code == 0, done.err
    assert (done.json["is_deleted"], [row["run_id"] for row in done.json["runs"]]) == (False, ["old"])
    assert done.json["bytes"] > 3000
    assert left(workdir) == {"old"}
    assert cli("runs", "prune", "old").code == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["aa"], {"bb", "crashed", "stopped"}),
        (["--keep", "1"], {"stopped"}),
        (["--keep", "0"], set()),
        (["--failed"], {"aa", "bb", "stopped"}),
        (["--older-than", "98.5h"], {"bb", "crashed", "stopped"}),
        (["--older-than", "1m", "--failed"], {"aa", "bb", "stopped"}),
        (["--older-than", "30d"], {"aa", "bb", "crashed", "stopped"}),
    ],
)
def test_criteria(cli, make_run: MakeRun, workdir: Path, words: list[str], expected: set[str]) -> None:
    make_run("aa")
    make_run("bb")
    make_run("crashed", ended=None)
    make_run("stopped", ended="stopped")
    done = cli("runs", "prune", *words, "--yes", "--json")
    assert done.code == 0, done.err
    assert left(workdir) == expected
    assert {row["run_id"] for row in done.json["runs"]} == {"aa", "bb", "crashed", "stopped"} - expected


def test_checkpoints_keeps_the_newest_and_the_best(cli, make_run: MakeRun) -> None:
    run = make_run("aa", steps=(1, 2, 3, 4))
    (run.checkpoints / "superseded-step_9").mkdir()
    done = cli("runs", "prune", "--checkpoints", "--yes", "--json")
    assert done.code == 0, done.err
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_1", "step_4", "latest", "best"}
    assert done.json["runs"][0]["checkpoints"] == ["step_2", "step_3", "superseded-step_9"]
    assert run.metrics.is_file()


def test_checkpoints_keeps_the_newest_intact_one(cli, make_run: MakeRun) -> None:
    run = make_run("aa", steps=(1, 2, 3, 4))
    (run.checkpoints / "step_4" / "model.safetensors").write_bytes(b"y" * 1000)
    (run.checkpoints / "step_3" / CHECKSUMS).write_text("[")
    assert cli("runs", "prune", "--checkpoints", "--yes").code == 0
    assert {path.name for path in run.checkpoints.glob("step_*")} == {"step_1", "step_2", "step_4"}
    for name in ("step_1", "step_2"):
        (run.checkpoints / name / CHECKSUMS).unlink()
    assert cli("runs", "prune", "--checkpoints", "--yes").code == 0
    assert {path.name for path in run.checkpoints.glob("step_*")} == {"step_1", "step_2", "step_4"}


@pytest.mark.parametrize("more", [[], ["--checkpoints"]])
def test_running_run_is_kept(cli, make_run: MakeRun, more: list[str]) -> None:
    run = make_run("aa")
    with RunLock(run.lock):
        done = cli("runs", "prune", "aa", *more, "--yes", "--json")
    assert done.code == 0, done.err
    assert (done.json["runs"], [row["run_id"] for row in done.json["kept"]]) == ([], ["aa"])
    assert (run.checkpoints / "step_2").is_dir()


def test_origin_of_a_run_without_checkpoint_is_kept(cli, make_run: MakeRun, workdir: Path) -> None:
    first, second = make_run("first"), make_run("second", steps=())
    second.meta.write_text(json.dumps({"origin": {"checkpoint": str(first.checkpoints / "step_1")}}))
    done = cli("runs", "prune", "first", "--yes", "--json")
    assert [row["run_id"] for row in done.json["kept"]] == ["first"]
    assert left(workdir) == {"first", "second"}


def test_linked_run_is_kept(cli, make_run: MakeRun, workdir: Path) -> None:
    run = make_run("aa")
    run.path.rename(workdir / "disk")
    run.path.symlink_to(workdir / "disk")
    assert len(cli("runs", "prune", "aa", "--yes", "--json").json["kept"]) == 1
    assert (workdir / "disk" / "meta.json").is_file()


def test_leftovers_of_a_killed_prune_are_removed(cli, make_run: MakeRun, workdir: Path) -> None:
    make_run("aa")
    (workdir / "runs" / ".doomed-bb-1234").mkdir()
    assert cli("runs", "prune", "aa", "--yes").code == 0
    assert left(workdir) == set()


def test_files_that_cannot_be_deleted_are_named(
    cli, make_run: MakeRun, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("aa")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # root, who runs the tests in CI, can delete everything
        done = cli("runs", "prune", "aa", "--yes")
    (doomed,) = left(workdir)
    assert f"aa is kept: some of its files cannot be deleted; they are in runs/{doomed}" in done.out
    assert "freed" not in done.out


@pytest.mark.parametrize("words", [[], ["nowhere"], ["--older-than", "x"], ["--keep", "-1"]])
def test_invalid_request_exits_64(cli, make_run: MakeRun, workdir: Path, words: list[str]) -> None:
    make_run("aa")
    assert cli("runs", "prune", *words, "--yes").code == 64
    assert left(workdir) == {"aa"}


def test_parse_age() -> None:
    assert [parse_age(text) for text in ("90m", "2h", "1.5d", "1w")] == [5400, 7200, 129600, 604800]
    with pytest.raises(UsageError):
        parse_age("2 days")
