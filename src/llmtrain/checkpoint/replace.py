"""Replacing a directory so that one of the two versions always exists under its name or beside it."""

import shutil
from pathlib import Path

from llmtrain.core.fault_injection import inject_fault


def replace_directory(new: Path, target: Path, old: Path, fault_step: int | None = None) -> None:
    """Rename `new` to `target`. A directory that already has the name is moved to `old` first and removed last, so a
    process that is killed in between leaves it there; a failed rename moves it back."""
    if target.is_symlink():
        target.unlink()
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        if fault_step is not None:
            inject_fault("save_while_replacing", fault_step)
    try:
        new.rename(target)
    except OSError:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
