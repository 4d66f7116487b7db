"""What a user gets from a wheel rather than a checkout. Building one fetches the build backend: `make e2e` only."""

import json
import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both distributions, by name."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [str(ROOT), str(ROOT / "client")]
    built = subprocess.run([*PIP, "wheel", "--no-deps", "-w", str(folder), *sources], capture_output=True, text=True)
    if built.returncode and not os.environ.get("CI"):
        pytest.skip(f"the wheels cannot be built here: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    found = {path.name.split("-")[0]: path for path in folder.glob("*.whl")}
    assert set(found) == {"llmtrain", "llmtrain_client"}
    return found


@pytest.fixture(scope="module")
def installed(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with llmtrain installed from its wheel, without its dependencies."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheels["llmtrain"])], check=True)
    return site


def install_in_new_environment(wheel: Path, folder: Path) -> Path:
    """The program `llmtrain` of a new virtual environment, with the dependencies that the wheel asks for."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), *PIP[1:], "install", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"packages cannot be downloaded here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin" / "llmtrain"


def contents(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


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


def test_both_wheels_have_the_same_files_and_version(wheels: dict[str, Path]) -> None:
    full, client = wheels["llmtrain"], wheels["llmtrain_client"]
    assert contents(full) == contents(client)
    assert metadata(full)["Version"] == metadata(client)["Version"]
    assert metadata(full)["License-Expression"] == metadata(client)["License-Expression"] == "Apache-2.0"
    required = metadata(client).get_all("Requires-Dist", [])
    assert required
    assert [row for row in required if row.startswith(("torch", "numpy"))] == []
    assert [row for row in metadata(full).get_all("Requires-Dist", []) if row.startswith("torch>=")]


@pytest.mark.slow
def test_client_works_in_new_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    llmtrain = install_in_new_environment(wheels["llmtrain_client"], tmp_path / "venv")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def code(*arguments: str) -> int:
        return subprocess.run(
            [str(llmtrain), *arguments], cwd=tmp_path, env=environment, capture_output=True
        ).returncode

    assert code("validate", "--config", "gpt_smoke") == 0
    assert code("launch", "--config", "k8s_indexed_job", "--image", "me/train:1", "--dry-run", "-o", "manifests/") == 0
    assert code("lint", "manifests") == 0
    assert code("train", "--config", "gpt_smoke") == 64
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_full_wheel_trains_in_new_environment(wheels: dict[str, Path], tmp_path: Path) -> None:
    llmtrain = install_in_new_environment(wheels["llmtrain"], tmp_path / "venv")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    words = [str(llmtrain), "train", "--config", "gpt_smoke", "--set", "output.run_id=first"]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "runs" / "first" / "finished.json").is_file()
