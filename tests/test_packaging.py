"""Exact dependency versions; no paths or hosts of a development machine in the checkout."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from llmtrain.cli import _TRAINING_PACKAGES

# No file of the checkout may match; the patterns are written so that this file does not match either.
FORBIDDEN = (
    r"/(?:home|Users)/[a-z]\w*/",
    r"(?<![\w.])/root[/]",
    r"--(?:extra-)?index[-]url",
    r"https?://\S+/[s]imple\b",
    r"registry[.]npmjs|pypi[.]org|files[.]pythonhosted",
)


@pytest.fixture(scope="module")
def project(repo: Path) -> dict[str, Any]:
    return tomllib.loads((repo / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins(repo: Path) -> dict[str, str]:
    """Name -> exact version, from constraints.txt."""
    lines = [line for line in (repo / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    found = [re.fullmatch(r"([\w.-]+)==([\w.!+]+)( ; .*)?", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {match[1]: match[2] for match in found if match}


@pytest.fixture(scope="module")
def client(repo: Path) -> dict[str, Any]:
    """client/pyproject.toml."""
    return tomllib.loads((repo / "client" / "pyproject.toml").read_text())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(project: dict[str, Any]) -> dict[str, str]:
    """Name -> minimum version of every dependency in pyproject.toml."""
    table = project["project"]
    extras = [row for rows in table["optional-dependencies"].values() for row in rows]
    rows = [re.fullmatch(r"([\w.-]+)(?:>=([\w.]+)(?:,<\d+)?)?", row) for row in (*table["dependencies"], *extras)]
    return {normal(row[1]): row[2] or "0" for row in rows if row}


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def test_constraints_equal_uv_copy(repo: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/constraints.py", "--check"], cwd=repo, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_dependency_is_pinned(project: dict[str, Any], pins: dict[str, str]) -> None:
    required = requirements(project)
    assert len(required) >= 20
    assert [name for name in required if name not in {normal(pin) for pin in pins}] == []


def test_pins_satisfy_minimum_versions(project: dict[str, Any], pins: dict[str, str]) -> None:
    exact = {normal(name): version for name, version in pins.items()}
    too_old = [name for name, minimum in requirements(project).items() if number(exact[name]) < number(minimum)]
    assert too_old == []


def test_pins_have_no_local_versions(pins: dict[str, str]) -> None:
    assert [version for version in pins.values() if "+" in version] == []


def test_entry_point_and_extras_exist(project: dict[str, Any]) -> None:
    table = project["project"]
    assert table["scripts"] == {"llmtrain": "llmtrain.__main__:main"}
    assert {"mlflow", "hf", "k8s", "dev"} <= set(table["optional-dependencies"])
    torch = next(row for row in table["dependencies"] if row.startswith("torch"))
    assert number(torch) >= (2, 11)


def test_client_requires_everything_but_training_packages(project: dict[str, Any], client: dict[str, Any]) -> None:
    table = project["project"]
    rows = [*table["dependencies"], *table["optional-dependencies"]["k8s"]]
    light = {row for row in rows if re.split("[<>=]", row)[0] not in _TRAINING_PACKAGES}
    assert set(client["project"]["dependencies"]) == light
    assert len(rows) - len(light) == len(_TRAINING_PACKAGES)
    assert client["project"]["optional-dependencies"]["s3"] == table["optional-dependencies"]["s3"]
    assert client["project"]["scripts"] == table["scripts"]


WITHOUT_TRAINING_PACKAGES = """
import contextlib, io, json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(name, name=name)

commands = json.loads(sys.argv[1])
from llmtrain.cli import _TRAINING_PACKAGES as HIDDEN, main
sys.meta_path.insert(0, Hidden())
results = []
for arguments in commands:
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            results.append([ended.code, output.getvalue()])
print(json.dumps(results))
"""


def test_commands_of_client_need_no_training_packages(tmp_path: Path) -> None:
    template = {"spec": {"restartPolicy": "Never"}}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"template": template}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    light = [
        ["validate", "--json"],
        ["launch", "--dry-run", "--image", "me/train:1"],
        ["lint", "job.json"],
        ["runs", "list"],
        ["status"],
    ]
    heavy = [["train"], ["generate", "--run", "first"], ["eval", "--run", "first", "--file", "job.json"], ["smoke"]]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRAINING_PACKAGES, json.dumps([*light, *([*row, "--json"] for row in heavy)])],
        cwd=tmp_path,
        env={**os.environ, "KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    results = json.loads(done.stdout)
    assert [code for code, _ in results] == [0, 0, 2, 0, 64, 64, 64, 64, 64]
    errors = [json.loads(output) for _, output in results[len(light) :]]
    assert all(error["error"] == "UsageError" and "pip install llmtrain" in error["remedy"] for error in errors), errors
    assert not (tmp_path / "runs").exists()


def test_both_distributions_read_the_version_of_one_file(
    repo: Path, project: dict[str, Any], client: dict[str, Any]
) -> None:
    for folder, table in ((repo, project), (repo / "client", client)):
        assert table["project"]["dynamic"] == ["version"]
        assert (folder / table["tool"]["hatch"]["version"]["path"]).samefile(repo / "src" / "llmtrain" / "version.py")


def test_python_m_llmtrain_runs_cli(repo: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", "presets", "--json"], cwd=repo, capture_output=True, check=True
    )
    assert b"gpt_stdlib" in done.stdout


@pytest.fixture(scope="module")
def tracked(repo: Path) -> dict[str, str]:
    """Path -> text of every tracked or untracked, not ignored file."""
    try:
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [repo / name for name in listed.split("\0") if name]
    texts = {}
    for path in paths:
        if path.is_file():
            data = path.read_bytes()
            if b"\0" not in data:
                texts[str(path.relative_to(repo))] = data.decode(errors="replace")
    assert len(texts) > 50
    return texts


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_files_contain_no_registry_or_machine_path(tracked: dict[str, str], pattern: str) -> None:
    found = [f"{path}: {match[0]}" for path, text in tracked.items() for match in re.finditer(pattern, text)]
    assert found == []


def test_files_contain_nothing_of_this_machine(repo: Path, tracked: dict[str, str]) -> None:
    """The path of the checkout and the configured package index."""
    settings = [value for name, value in os.environ.items() if re.match(r"(PIP|UV)_.*(INDEX|FIND_LINKS)", name)]
    hosts = [urlsplit(part).hostname or "" for value in settings for part in value.split()]
    values = {str(repo), str(repo.parent / "shared"), *settings, *hosts} - {"", "/"}
    found = [f"{path}: {value}" for path, text in tracked.items() for value in values if value in text]
    assert found == []


def test_gitignore_has_uv_lock_and_runs(repo: Path, tracked: dict[str, str]) -> None:
    assert {"uv.lock", ".venv/", "/runs/"} <= set((repo / ".gitignore").read_text().split())
    assert "uv.lock" not in tracked
