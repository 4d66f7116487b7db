"""meta.json: versions, machine and command line of a run."""

import os
import platform
import re
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from llmtrain.compat.run_files import architecture_in
from llmtrain.core.env import CODE_HASH
from llmtrain.core.redact import allowed_environment, redact, redact_words
from llmtrain.version import __version__

_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "safetensors",
    "datasets",
    "tiktoken",
    "tokenizers",
    "transformers",
    "peft",
    "mlflow",
)
_SAME_ARCHITECTURE = {"amd64": "x86_64", "arm64": "aarch64"}


def collect_metadata(run_id: str, name: str, device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "run_id": run_id,
        "name": redact(name),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "argv": redact_words(sys.argv),
        "git": _git(),
        "versions": versions(),
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "architecture": cpu_architecture(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "device": device,
        },
        "environment": allowed_environment(),
    }
    if CODE_HASH in os.environ:
        facts["code_sha256"] = os.environ[CODE_HASH]
    return facts


def cpu_name() -> str:
    """The model of this machine's CPU; its architecture where the system does not name the model, as on many ARM
    machines."""
    return _cpu_info("model name") or cpu_architecture()


def cpu_flags() -> str:
    """The instructions of this machine's CPU as Linux names them on x86_64 and aarch64; empty on other systems."""
    return _cpu_info("flags|Features")


def _cpu_info(field: str) -> str:
    """The first value of a field, a regular expression; empty where the system does not have it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(rf"^(?:{field})\s*:\s*(\S.*)$", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def cpu_architecture() -> str:
    """x86_64 or aarch64, under one name on every operating system. Results are bit-identical per architecture."""
    name = platform.machine().lower()
    return _SAME_ARCHITECTURE.get(name, name)


def architecture_of(meta: dict[str, Any]) -> str | None:
    """The CPU architecture recorded in meta.json; None if it is not."""
    machine = meta.get("machine")
    if not isinstance(machine, dict):
        return None
    recorded = machine.get("architecture")
    if isinstance(recorded, str):
        return recorded
    name = architecture_in(machine.get("platform"))
    if name is None:
        return None
    return _SAME_ARCHITECTURE.get(name, name)


@cache
def versions() -> dict[str, str]:
    """Versions of llmtrain, Python and the installed packages that llmtrain uses."""
    installed = {"llmtrain": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def _git() -> dict[str, Any] | None:
    """The commit of the working directory; None if it is not a git checkout."""
    try:
        sha = _run_git("rev-parse", "HEAD")
        return {"sha": sha, "dirty": bool(_run_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run_git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=5)
    return done.stdout.strip()
