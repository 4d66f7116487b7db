import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain.config.section import RUN_ID_PATTERN
from llmtrain.errors import UsageError
from llmtrain.runs.directory import RunDirectory, check_run_id, find_run, list_runs, new_run, new_run_id

BAD_IDS = [
    "",
    "a",
    "..",
    ".",
    "../x",
    "a/b",
    "/etc",
    "A-b",
    "1a",
    "-a",
    "a-",
    "a_b",
    "a b",
    "a\n",
    "ab\x00",
    "é-a",
    "a" * 41,
]


def make(root: Path, run_id: str) -> RunDirectory:
    run = RunDirectory(root / run_id)
    run.create()
    run.meta.write_text("{}")
    return run


def refused(*facts: str) -> pytest.RaisesExc[UsageError]:
    return pytest.raises(UsageError, match="(?s)" + ".*".join(map(re.escape, facts)))


class TestRunId:
    @pytest.mark.parametrize("run_id", BAD_IDS)
    def test_invalid_ids_are_refused(self, run_id: str, tmp_path: Path) -> None:
        with refused(repr(run_id)):
            check_run_id(run_id)
        if run_id:
            with pytest.raises(UsageError):
                new_run(str(tmp_path), run_id, "x")
            assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("run_id", ["ab", "a1", "my-run-1", "a" * 40])
    def test_valid_ids_are_accepted(self, run_id: str) -> None:
        check_run_id(run_id)

    @given(st.text())
    def test_any_name_gives_a_valid_id(self, name: str) -> None:
        assert re.fullmatch(RUN_ID_PATTERN, new_run_id(name))

    def test_new_ids_contain_the_name_and_differ(self) -> None:
        first, second = new_run_id("My GPT, no. 2!"), new_run_id("My GPT, no. 2!")
        assert first.startswith("my-gpt-no-2-")
        assert first != second


class TestNewRun:
    def test_new_run_creates_nothing(self, tmp_path: Path) -> None:
        run = new_run(str(tmp_path / "runs"), "one", "x")
        assert list(tmp_path.iterdir()) == []
        run.create()
        assert run.path.is_dir()
        assert run.exists()

    def test_existing_run_is_refused(self, tmp_path: Path) -> None:
        make(tmp_path, "one")
        with refused("'one' already exists", "--resume one"):
            new_run(str(tmp_path), "one", "x")

    def test_second_create_is_refused(self, tmp_path: Path) -> None:
        first, second = new_run(str(tmp_path), "one", "x"), new_run(str(tmp_path), "one", "x")
        first.create()
        with refused("'one' already exists"):
            second.create()

    def test_link_to_run(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        (outside / "checkpoints").mkdir(parents=True)
        root = tmp_path / "runs"
        root.mkdir()
        (root / "one").symlink_to(outside)
        (root / "two").symlink_to(tmp_path / "nowhere")
        for run_id in ("one", "two"):
            with refused("already exists"):
                new_run(str(root), run_id, "x")
        assert find_run(str(root), "one").run_id == "one"
        assert find_run(str(root), str(root / "one")).path == root / "one"
        assert [run.run_id for run in list_runs(str(root))] == ["one"]
        with refused("no run 'two'"):
            find_run(str(root), "two")

    def test_list_is_in_the_order_of_the_recorded_starts(self, tmp_path: Path) -> None:
        """A copy changes the times of the files; only a damaged file is sorted by its time."""
        starts = {"last": "2026-11-18T10:00:02+0000", "first": "2026-11-18T12:00:01+0200", "damaged": "yesterday"}
        for modified, (name, start) in enumerate(starts.items()):
            run = RunDirectory(tmp_path / name)
            run.checkpoints.mkdir(parents=True)
            run.meta.write_text(json.dumps({"run_id": name, "started_at": start}))
            os.utime(run.meta, (modified, modified))
        assert [run.run_id for run in list_runs(str(tmp_path))] == ["damaged", "first", "last"]

    def test_list_skips_run_deleted_meanwhile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("one", "two"):
            (tmp_path / name / "checkpoints").mkdir(parents=True)
        is_dir = Path.is_dir

        def is_dir_and_gone(path: Path) -> bool:
            found = is_dir(path)
            if path == tmp_path / "one" / "checkpoints":
                shutil.rmtree(tmp_path / "one", ignore_errors=True)
            return found

        monkeypatch.setattr(Path, "is_dir", is_dir_and_gone)
        assert [run.run_id for run in list_runs(str(tmp_path))] == ["two"]

    @pytest.mark.parametrize("below", ["", "/deeper", "/deeper/still"])
    def test_file_in_path_is_refused(self, tmp_path: Path, below: str) -> None:
        (tmp_path / "file").write_text("")
        with refused("Cannot write", "output.root_dir"):
            new_run(f"{tmp_path}/file{below}", "one", "x")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    @pytest.mark.parametrize("mode", [0o500, 0o000])
    def test_missing_permission_is_refused(self, tmp_path: Path, mode: int) -> None:
        locked = tmp_path / "locked"
        locked.mkdir(mode=mode)
        try:
            for root in (locked, locked / "deeper"):
                with refused("Cannot write", "output.root_dir"):
                    new_run(str(root), "one", "x")
        finally:
            locked.chmod(0o700)


class TestFindRun:
    def test_find_by_id_and_path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = make(tmp_path / "runs", "one").path
        monkeypatch.chdir(tmp_path)
        assert find_run("runs", "one").path.resolve() == made
        assert find_run("elsewhere", str(made)).path == made
        assert find_run("elsewhere", "runs/one").path == made
        assert find_run("elsewhere", "runs/../runs/one").run_id == "one"

    def test_unknown_run_suggests_the_nearest(self, tmp_path: Path) -> None:
        make(tmp_path, "first-run")
        with refused("'first-rum'", "Did you mean 'first-run'?", "runs list"):
            find_run(str(tmp_path), "first-rum")

    @pytest.mark.parametrize("reference", ["../x", "..", "/etc", "a/../../etc", "./", "~"])
    def test_path_must_be_a_run(self, tmp_path: Path, reference: str) -> None:
        with pytest.raises(UsageError):
            find_run(str(tmp_path), reference)

    def test_list_is_oldest_first_and_skips_other_files(self, tmp_path: Path) -> None:
        for age, run_id in enumerate(["newest", "middle", "oldest"]):
            run = make(tmp_path, run_id)
            for path in (run.meta, run.path):
                if path.exists():
                    os.utime(path, (time.time() - age * 100,) * 2)
        (tmp_path / "mlartifacts").mkdir()
        (tmp_path / "Not-A-Run").mkdir()
        (tmp_path / "mlflow.db").write_text("")
        assert [run.run_id for run in list_runs(str(tmp_path))] == ["oldest", "middle", "newest"]

    def test_list_of_missing_root_is_empty(self, tmp_path: Path) -> None:
        assert list_runs(str(tmp_path / "nowhere")) == []


def test_file_names(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "one")
    names = {path.name for path in (run.config, run.meta, run.metrics, run.logs, run.checkpoints)}
    assert names == {"config.yaml", "meta.json", "metrics.jsonl", "logs", "checkpoints"}
    assert {path.parent for path in (run.config, run.meta, run.metrics, run.logs, run.checkpoints)} == {run.path}
