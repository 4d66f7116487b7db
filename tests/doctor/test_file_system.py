"""The check of the file system of the runs, on this one and on imitations of others."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.doctor import file_system as module
from llmtrain.doctor.file_system import OPERATIONS, file_system


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def copy_instead_of_rename(self: Path, target: Path) -> Path:
    """As an object store does, which has no rename."""
    if self.is_dir():
        target.mkdir()
    else:
        target.write_bytes(self.read_bytes())
    return target


class NoLock:
    """As a mount without locks: every process gets it."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_this_file_system_passes_and_nothing_is_left(tmp_path: Path) -> None:
    found = file_system(tmp_path)
    assert found.status == "pass"
    assert all(name in found.evidence for name in OPERATIONS)
    assert list(tmp_path.iterdir()) == []


def open_without(modes: str) -> Callable[..., Any]:
    open_file = Path.open

    def opened(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode == modes:
            refuse()
        return open_file(self, mode, *arguments, **options)

    return opened


@pytest.mark.parametrize(
    ("place", "name", "imitation", "operation"),
    [
        (Path, "replace", refuse, "rename over a file"),
        (Path, "replace", copy_instead_of_rename, "rename over a file"),
        (Path, "rename", refuse, "rename of a directory"),
        (Path, "open", open_without("ab"), "append"),
        (Path, "open", open_without("r+b"), "overwrite"),
        (module, "fsync_dir", refuse, "fsync"),
        (module, "FileLock", NoLock, "locks"),
        (Path, "touch", lambda *_, **__: None, "exclusive create"),
        (module.mmap, "mmap", refuse, "memory maps"),
    ],
)
def test_missing_operation_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, imitation: Any, operation: str
) -> None:
    monkeypatch.setattr(place, name, imitation)
    found = file_system(tmp_path)
    assert found.status == "fail"
    assert [each for each in OPERATIONS if each in found.evidence] == [operation]
    assert "output.root_dir" in str(found.remedy)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_every_operation_has_an_imitation_without_it() -> None:
    rows = test_missing_operation_is_named.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {row[-1] for row in rows} == set(OPERATIONS)


def test_appended_line_that_cannot_be_seen_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a cache that keeps what was written until the file is closed."""
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"" if self.name == "appended" else read(self))
    found = file_system(tmp_path)
    assert "append (12 bytes were expected, 0 others were read)" in found.evidence
