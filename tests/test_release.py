"""tools/release.py, the workflow file and SECURITY.md. Building a whole release is slow: it installs three packages."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from llmtrain import __version__

GIT = {**os.environ, "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
GIT["GIT_COMMITTER_EMAIL"] = "a@b"


@pytest.fixture
def release(repo: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", repo / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notes_are_the_section_of_the_version(release: ModuleType) -> None:
    text = (
        "# Changelog\n\n## [Unreleased]\n- later\n\n## [1.1.0] - 2026-01-02\n- new\n\n## [1.0.0] - 2026-01-01\n- old\n"
    )
    assert release.release_notes(text, "1.1.0") == "# llmtrain 1.1.0\n\n- new\n"
    assert release.release_notes(text, "1.0.0") == "# llmtrain 1.0.0\n\n- old\n"


@pytest.mark.parametrize("section", ["", "## [1.1.0]\n- no date\n", "## [1.1.0] - 2026-01-02\n\n"])
def test_a_version_without_notes_is_not_released(release: ModuleType, section: str) -> None:
    with pytest.raises(SystemExit, match=r"CHANGELOG\.md"):
        release.release_notes(f"# Changelog\n\n{section}\n## [1.0.0] - 2026-01-01\n- old\n", "1.1.0")


def test_changelog_has_notes_for_the_version(release: ModuleType, repo: Path) -> None:
    assert "### Added" in release.release_notes((repo / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)


def test_uncommitted_changes_are_not_released(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, env=GIT, check=True, capture_output=True)

    monkeypatch.setattr(release, "ROOT", tmp_path)
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "one")
    release.check_commit("1.0.0")
    git("tag", "v1.0.0")
    release.check_commit("1.0.0")
    (tmp_path / "a").write_text("2")
    with pytest.raises(SystemExit, match="uncommitted"):
        release.check_commit("1.0.0")
    git("commit", "-am", "two")
    with pytest.raises(SystemExit, match=r"v1\.0\.0 is another commit"):
        release.check_commit("1.0.0")


def test_packages_are_installed_from_a_relative_directory(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[Path] = []
    for name in ("check_commit", "export_commit", "build_packages"):
        monkeypatch.setattr(release, name, lambda *_: None)
    monkeypatch.setattr(release, "check_packages", lambda target, *_: installed.append(target))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["release.py", "--to", "dist/release"])
    release.main()
    assert installed == [tmp_path / "dist" / "release"]
    assert (tmp_path / "dist" / "release" / "SHA256SUMS").is_file()


def test_image_build_command_runs_in_the_clone(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path in it is one of the clone, and not of the copy that is built."""
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (tmp_path / "source").mkdir()
    (tmp_path / "build").write_text('#!/bin/sh\necho "$@" > built\n')
    (tmp_path / "build").chmod(0o755)
    options = SimpleNamespace(image_build="./build {tag} {context} -f {dockerfile}", image_arguments=["cpu=--quiet"])
    release.build_image(tmp_path / "source", "1.0.0", "cpu", options)
    tag, context, *more = (tmp_path / "built").read_text().split()
    assert (tag, context) == ("llmtrain:1.0.0", str(tmp_path / "source"))
    assert more == [
        "-f",
        str(tmp_path / "source" / "docker" / "Dockerfile"),
        "--label",
        "org.opencontainers.image.version=1.0.0",
        "--quiet",
    ]


def test_workflow_tests_two_pythons_and_both_architectures(repo: Path) -> None:
    jobs = yaml.safe_load((repo / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert len(matrix["python"]) == 2
    assert any(name.endswith("-arm") for name in matrix["machine"])
    assert any(not name.endswith("-arm") for name in matrix["machine"])
    targets = set(re.findall(r"^([a-z0-9-]+):", (repo / "Makefile").read_text(), flags=re.M))
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    used = {word for line in commands for word in re.findall(r"^make ([a-z0-9-]+)", line)}
    assert used == {"lint", "test", "release"} & targets


def test_workflow_uses_no_stored_secret(repo: Path) -> None:
    assert "secrets." not in (repo / ".github" / "workflows" / "ci.yml").read_text()


@pytest.mark.slow
def test_release_is_complete_and_its_checksums_are_right(repo: Path, tmp_path: Path) -> None:
    if not os.environ.get("CI"):
        pytest.skip("downloads packages; set CI=1 to run it")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(repo), str(clone)], check=True)
    target = tmp_path / "release"
    command = [sys.executable, "tools/release.py", "--to", str(target)]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(reversed(line.split("  ")) for line in (target / "SHA256SUMS").read_text().splitlines())
    assert set(lines) | {"SHA256SUMS"} == {path.name for path in target.iterdir()}
    assert all(hashlib.sha256((target / name).read_bytes()).hexdigest() == digest for name, digest in lines.items())
    stems = {name.split(__version__)[0] for name in lines}
    assert stems == {"llmtrain-", "llmtrain_client-", "NOTES.md"}
