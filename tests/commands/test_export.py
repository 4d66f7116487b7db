"""llmtrain export."""

import json
from pathlib import Path

import pytest


class TestExport:
    def test_export_has_files_for_transformers(self, cli, verb, workdir: Path) -> None:
        done = cli(*verb("export"), "--json")
        assert {"config.json", "model.safetensors"} <= set(done.json["files"])
        assert set(done.json["files"]) == {path.name for path in (workdir / "exported").iterdir()}
        assert json.loads((workdir / "exported/config.json").read_text())["model_type"] == "gpt2"

    def test_existing_files_are_not_overwritten(self, cli, verb, workdir: Path) -> None:
        (workdir / "exported").mkdir()
        (workdir / "exported/mine.txt").write_text("x")
        assert cli(*verb("export")).code == 64
        assert [path.name for path in (workdir / "exported").iterdir()] == ["mine.txt"]

    def test_unwritable_target_is_refused(self, cli, root: Path, text: Path) -> None:
        done = cli("export", "--no-check", "--run", "one", "--root", root, "--to", text / "below")
        assert done.code == 64
        assert "Cannot write" in done.err

    def test_export_keeps_other_files(self, cli, verb, workdir: Path) -> None:
        for name in (".old-exported", ".new-exported"):
            (workdir / name).mkdir()
            (workdir / name / "mine.txt").write_text("x")
        assert cli(*verb("export")).code == 0
        assert sorted(path.name for path in workdir.glob(".*")) == [".new-exported", ".old-exported"]
        assert all((workdir / name / "mine.txt").is_file() for name in (".old-exported", ".new-exported"))

    @pytest.mark.parametrize("kind", ["here", "link", "link to nothing", "empty"])
    def test_export_into_existing_directory(
        self, cli, verb, workdir: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """The directory itself is kept: it may be a mount, or the working directory of a process."""
        arguments = verb("export")[:-2]
        disk, link = workdir / "disk", workdir / "link"
        if kind != "link to nothing":
            disk.mkdir()
        if kind.startswith("link"):
            link.symlink_to(disk)
        before = disk.stat().st_ino if disk.exists() else None
        if kind == "here":
            monkeypatch.chdir(disk)
        done = cli(*arguments, "--to", {"here": ".", "empty": disk}.get(kind, link), "--json")
        assert done.code == 0, done.err
        assert before in (None, disk.stat().st_ino)
        assert set(done.json["files"]) == {path.name for path in disk.iterdir()} >= {"config.json", "README.md"}
        assert link.is_symlink() == kind.startswith("link")
        again = cli(*arguments, "--to", disk)
        assert again.code == 64
        assert "Traceback" not in again.err

    @pytest.mark.parametrize("kind", ["loop", "file", "link to a file", "below a file", "too long"])
    def test_export_to_unwritable_directory(self, cli, verb, workdir: Path, kind: str) -> None:
        (workdir / "file").write_text("mine")
        (workdir / "loop").symlink_to("loop")
        (workdir / "link").symlink_to("file")
        to = {"link to a file": "link", "below a file": "file/below", "too long": "x" * 300}.get(kind, kind)
        done = cli(*verb("export")[:-2], "--to", workdir / to)
        assert done.code == 64, done.err
        assert "Traceback" not in done.err
        assert (workdir / "file").read_text() == "mine"
        assert not list(workdir.glob(".llmtrain-*"))

    def test_export_can_be_trained(self, cli, verb, train, workdir: Path) -> None:
        assert cli(*verb("export")).code == 0
        gpt = ["model.name=gpt", "model.n_layers=1", "model.n_heads=2", f"model.init={workdir / 'exported'}"]
        done = train(*gpt, more=["--json"])
        assert done.code == 0, done.err
        assert done.json["first_train_loss"] < 5.4

    def test_model_without_export_format(self, cli, train) -> None:
        train("output.run_id=dummy")
        done = cli("export", "--no-check", "--run", "dummy", "--to", "there")
        assert done.code == 64
        assert "dummy_gpt" in done.err
        assert not Path("there").exists()
