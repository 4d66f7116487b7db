"""What `make train` and `make test` would install, from make's dry run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
EXTRAS = "-e '.[mlflow,"


def installs(repo: Path, target: str, folder: Path, path: str = "/usr/bin:/bin") -> list[str]:
    """The install commands of a target, with a virtual environment in the folder."""
    command = ["make", "-n", "-C", str(repo), target, f"VENV={folder}/venv"]
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "UV")}
    done = subprocess.run(command, env={**environment, "PATH": path}, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "pip install" in line]


def test_train_installs_no_extras(repo: Path, tmp_path: Path) -> None:
    for target in ("train", "train-ddp"):
        [line] = installs(repo, target, tmp_path)
        assert line.endswith("-c constraints.txt -e .")


@pytest.mark.parametrize("target", ["test", "lint", "e2e", "k8s-train", "wheels"])
def test_other_targets_install_extras(repo: Path, tmp_path: Path, target: str) -> None:
    [line] = installs(repo, target, tmp_path)
    assert EXTRAS in line


def test_each_install_is_done_once(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / ".installed-train").touch()
    assert installs(repo, "train", tmp_path) == []
    [line] = installs(repo, "test", tmp_path)
    assert EXTRAS in line
    (tmp_path / "venv" / ".installed").touch()
    assert installs(repo, "test", tmp_path) == installs(repo, "train", tmp_path) == []


def test_full_install_counts_for_training(repo: Path, tmp_path: Path) -> None:
    command = ["make", "-n", "-C", str(repo), "setup", f"VENV={tmp_path}/venv"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert f"touch {tmp_path}/venv/.installed-train {tmp_path}/venv/.installed" in lines


def test_uv_is_used_if_it_is_on_the_path(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    [line] = installs(repo, "train", tmp_path, f"{tmp_path}/bin:/usr/bin:/bin")
    assert line.startswith(f"{uv} pip install")
    [line] = installs(repo, "train", tmp_path)
    assert "python -m pip install" in line
