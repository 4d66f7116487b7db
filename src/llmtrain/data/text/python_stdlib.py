"""`python_stdlib`: the source files of Python's standard library, real text that is on every machine."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llmtrain.config.data import PythonStdlibSection
from llmtrain.data.base import TextData
from llmtrain.data.text_and_examples import Split, TextChunk
from llmtrain.errors import DataError

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class PythonStdlib(TextData):
    config: PythonStdlibSection

    def identity(self) -> dict[str, Any]:
        sizes = [[str(path.relative_to(_directory())), path.stat().st_size] for path in _files()]
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
                    continue  # a few test files use other encodings

    def _is_val(self, path: Path) -> bool:
        """Whole files are held out, chosen by the hash of their name, so the split is the same on every machine."""
        digest = hashlib.sha256(path.relative_to(_directory()).as_posix().encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.config.val_fraction * 2**64


@cache
def _directory() -> Path:
    return Path(sysconfig.get_path("stdlib"))


@cache
def _files() -> list[Path]:
    files = []
    for directory, subdirectories, names in os.walk(_directory()):
        subdirectories[:] = [name for name in subdirectories if name not in _EXCLUDED]  # os.walk skips them
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    files = [path for path in files if path.stat().st_size]
    if not files:
        raise DataError(
            f"This Python has no source files in {_directory()}.",
            remedy="Set data.name to text_files and data.files to your own files.",
        )
    return sorted(files)
