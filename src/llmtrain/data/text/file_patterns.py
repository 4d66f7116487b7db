"""What `llmtrain init` writes as `data.files`: globs instead of the hundreds of names that a shell makes of one."""

import glob
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmtrain.data.records.open_file import RECORD_SUFFIXES
from llmtrain.errors import DataError

PLAIN_SUFFIXES = (".txt", ".text", ".md", ".rst")
MIN_FILES = 4
"""Fewer files of one directory are listed by name."""


def patterns(names: Sequence[str]) -> list[str]:
    """Globs for directories, and for files that are exactly what one glob matches; other names as they are."""
    found: list[str] = []
    files: list[str] = []
    for name in names:
        if Path(name).expanduser().is_dir():
            found += _directory_patterns(name)
        else:
            files.append(name)
    return [*found, *_as_globs(files)]


def _directory_patterns(name: str) -> list[str]:
    """A glob for each suffix of text in the directory and below."""
    directory = Path(name).expanduser()
    paths = [path for path in directory.rglob("*") if path.is_file() and not _is_hidden(path, directory)]
    texts = [path for path in paths if path.suffix.lower() in (*PLAIN_SUFFIXES, *RECORD_SUFFIXES)]
    if not texts:
        suffixes = Counter(path.suffix or "no suffix" for path in paths).most_common(5)
        raise DataError(
            f"The directory {name} has no text files.",
            known=[f"{count} with {suffix}" for suffix, count in suffixes],
            remedy=f"Files with {', '.join((*PLAIN_SUFFIXES, *RECORD_SUFFIXES))} are found. Pass others by name.",
        )
    prefix = glob.escape(name.rstrip("/")) or "/"
    found = []
    for suffix in sorted({path.suffix for path in texts}):
        is_flat = all(path.parent == directory for path in texts if path.suffix == suffix)
        found.append(f"{prefix}/*{suffix}" if is_flat else f"{prefix}/**/*{suffix}")
    return found


def _is_hidden(path: Path, directory: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(directory).parts)


def _as_globs(names: Sequence[str]) -> list[str]:
    """One glob for all files of a directory with one suffix, where every file that it matches was named."""
    groups: dict[str, list[str]] = {}
    for name in names:
        path = Path(name)
        pattern = str(Path(glob.escape(str(path.parent))) / f"*{path.suffix}")
        groups.setdefault(pattern, []).append(name)
    result: list[str] = []
    for pattern, group in groups.items():
        matches = {Path(match) for match in glob.glob(str(Path(pattern).expanduser()))}
        is_all = matches == {Path(name).expanduser() for name in group}
        result += [pattern] if is_all and len(group) >= MIN_FILES else group
    return result
