"""core/install.py: the command that installs an extra, in a clone and for a package."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from llmtrain.core import install


class Installed:
    """What importlib.metadata knows about a distribution."""

    def __init__(self, name: str) -> None:
        self.metadata = {"Name": name}


def have(monkeypatch: pytest.MonkeyPatch, *found: Installed) -> None:
    by_name = {one.metadata["Name"]: one for one in found}

    def distribution(name: str) -> Installed:
        if name not in by_name:
            raise PackageNotFoundError(name)
        return by_name[name]

    monkeypatch.setattr(install, "distribution", distribution)


def is_in(monkeypatch: pytest.MonkeyPatch, clone: Path | None) -> None:
    monkeypatch.setattr(install, "source_clone", lambda: clone)


def test_clone_with_its_own_environment_uses_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_in(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert install.install_command("page") == f"make -C {tmp_path} setup"
    assert install.install_command("qlora").endswith(f"-c '{tmp_path}/constraints.txt' -e '{tmp_path}[qlora]'")


def test_clone_in_another_environment_uses_its_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "my clone"
    is_in(monkeypatch, clone)
    command = install.install_command("page")
    assert command.startswith(f"{sys.executable} -m pip install ")
    assert command.endswith(f"-e '{clone}[page]'")


@pytest.mark.parametrize("name", ["llmtrain", "llmtrain-client"])
def test_package_is_extended_by_its_own_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    is_in(monkeypatch, None)
    have(monkeypatch, Installed(name))
    assert install.install_command("s3") == f"pip install '{name}[s3]'"


def test_clone_is_the_one_of_this_module(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.source_clone() == repo
    monkeypatch.setattr(
        install, "__file__", str(tmp_path / "lib" / "site-packages" / "llmtrain" / "core" / "install.py")
    )
    assert install.source_clone() is None


def test_no_message_names_an_install_command_of_its_own(repo: Path) -> None:
    found = [
        str(path)
        for path in (repo / "src" / "llmtrain").rglob("*.py")
        if "pip install 'llmtrain" in path.read_text(encoding="utf-8")
    ]
    assert found == []
