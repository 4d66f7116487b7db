"""What a user gets from a wheel rather than a checkout. Building one fetches the build backend: `make e2e` only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with llmtrain installed from its wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], capture_output=True, text=True)
    if built.returncode and not os.environ.get("CI"):
        pytest.skip(f"the wheel cannot be built here: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


def run(installed: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(installed), "HOME": str(folder)}
    command = [sys.executable, "-m", "llmtrain", *arguments, "--json"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)


def test_wheel_contains_the_presets(installed: Path, tmp_path: Path) -> None:
    found = json.loads(run(installed, tmp_path, "presets").stdout)["presets"]
    assert {row["name"] for row in found} == {path.stem for path in (ROOT / "configs" / "presets").glob("*.yaml")}
    assert all(row["path"].startswith(str(installed)) for row in found)


def test_it_trains(installed: Path, tmp_path: Path) -> None:
    result = json.loads(run(installed, tmp_path, "train", "--config", "gpt_smoke").stdout)
    assert result["final_train_loss"] < result["first_train_loss"]
    assert (tmp_path / result["run_dir"] / "checkpoints" / "step_30").is_dir()
