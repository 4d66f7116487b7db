"""`python_stdlib`: the source files of Python's own standard library, real text that every machine has."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llmtrain.config.data import PythonStdlibSection
from llmtrain.data.base import Split, TextChunk, TextData
from llmtrain.errors import DataError

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class PythonStdlib(TextData):
    config: PythonStdlibSection

    def identity(self) -> dict[str, Any]:
        sizes = [[str(path.relative_to(_folder())), path.stat().st_size] for path in _files()]
        digest = hashlib.sha256(repr(sizes).encode()).hexdigest()
        return {
            "kind": "python_stdlib",
            "python": platform.python_version(),
            "files": digest,
            "val": self.config.val_fraction,
        }

    def chunks(self, split: Split) -> Iterator[TextChunk]:
        for path in _files():
            if self._is_val(path) == (split == "val"):
                try:
                    yield TextChunk(path.read_text(encoding="utf-8"), ends_document=True)
                except UnicodeDecodeError:
                    continue  # a few files are in other encodings on purpose

    def _is_val(self, path: Path) -> bool:
        """Whole files are held out, chosen by their name, so that the split is the same on every machine."""
        digest = hashlib.sha256(path.relative_to(_folder()).as_posix().encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.config.val_fraction * 2**64


@cache
def _folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def _files() -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(_folder()):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]  # not even looked into
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise DataError(
            f"This Python has no source files in {_folder()}.",
            remedy="Use data.name: text_files with files of your own.",
        )
    return sorted(files)
