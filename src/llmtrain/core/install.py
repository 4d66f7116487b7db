"""The command that installs an extra, where llmtrain is installed now: in a clone, or as a package."""

import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

DOCKERFILE = "docker/Dockerfile"
NOT_IN_SETUP = ("qlora",)
"""Extras that `make setup` does not install."""


def install_command(extra: str) -> str:
    """A command line that works in the current directory."""
    clone = source_clone()
    if clone is None:
        return f"pip install '{_name()}[{extra}]'"
    if extra not in NOT_IN_SETUP and Path(sys.prefix) == clone / ".venv":
        return f"make -C {shlex.quote(str(clone))} setup"
    return f"{sys.executable} -m pip install -c '{clone}/constraints.txt' -e '{clone}[{extra}]'"


def source_clone() -> Path | None:
    """The clone that contains this module; None in an installed package."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / DOCKERFILE).is_file() else None


def _name() -> str:
    """llmtrain-client if only that is installed."""
    try:
        distribution("llmtrain")
    except PackageNotFoundError:
        try:
            return distribution("llmtrain-client").metadata["Name"]
        except PackageNotFoundError:
            pass
    return "llmtrain"
