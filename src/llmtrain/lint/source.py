"""Input of the linter: files, directories and standard input, and the manifests in them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UsageError
from llmtrain.lint.yaml_nodes import Node, NotAManifest, parse

STDIN = "-"
SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 32 << 20
"""Larger than all manifests of a cluster; a larger file, such as a device, is not one."""


@dataclass(frozen=True)
class Sources:
    """The objects of all files, and the files of a directory that contain no manifest."""

    objects: list[Node]
    files: list[str]
    skipped: list[str]


def read_sources(paths: Sequence[str]) -> Sources:
    """All manifests in files and directories. All unreadable files are reported in one error."""
    objects: list[Node] = []
    files: list[str] = []
    skipped: list[str] = []
    problems: list[str] = []
    for path, is_named in _files(paths, problems):
        try:
            found = list(objects_of(_read(path)))
        except NotAManifest as problem:
            problems.append(f"{path}:{problem.line}: {problem}" if problem.line else f"{path}: {problem}")
            continue
        except _NoObject as problem:
            (problems if is_named else skipped).append(f"{path}{problem}" if is_named else path)
            continue
        files.append(_display_name(path))
        objects += found
    if problems:
        files_are = f"{len(problems)} files are" if len(problems) > 1 else "One file is"
        error = UsageError(f"{files_are} not readable as Kubernetes manifests:\n  " + "\n  ".join(problems))
        error.details["problems"] = problems
        raise error
    if not files:
        raise UsageError(
            f"No Kubernetes manifest found in {', '.join(paths)}.", remedy="Name files with `apiVersion` and `kind`."
        )
    return Sources(objects, files, skipped)


class _NoObject(Exception):
    """Valid YAML that is not a manifest: an error if the file was named, skipped in a directory."""


def _files(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, bool]]:
    """(file, whether it was named explicitly), each file once."""
    done: set[Path] = set()
    for name, is_named in _candidates(paths, problems):
        path = Path(name).resolve()
        if name == STDIN or path not in done:
            yield name, is_named
        done.add(path)


def _candidates(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, bool]]:
    for name in dict.fromkeys(paths):
        path = Path(name)
        if name == STDIN or path.is_file():
            yield name, True
        elif path.is_dir():
            for file in sorted(path.rglob("*")):
                is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.suffix in SUFFIXES and file.is_file() and not is_hidden:
                    yield str(file), False
        elif path.exists():  # a pipe, as in <(helm template ...)
            yield name, True
        else:
            problems.append(f"{name}: no such file or directory")


def _display_name(path: str) -> str:
    return "<stdin>" if path == STDIN else path


def _read(path: str) -> list[Node]:
    try:
        with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise NotAManifest(f"larger than {MAX_BYTES >> 20} MiB")
        return parse(raw.decode("utf-8-sig"), _display_name(path))
    except UnicodeDecodeError:
        raise NotAManifest("not UTF-8 text") from None
    except OSError as error:
        raise NotAManifest(error.strerror or str(error)) from None


def objects_of(documents: list[Node]) -> Iterator[Node]:
    """The objects in documents; a List is expanded."""
    if not documents:
        raise _NoObject(": empty")
    others = [each for each in documents if not (each.get("kind").text and each.get("apiVersion").text)]
    if others:
        reason, line = "not a Kubernetes manifest: `apiVersion` or `kind` is missing", others[0].line
        raise _NoObject(f":{line}: {reason}") if others == documents else NotAManifest(reason, line)
    for document in documents:
        if document.get("kind").text.endswith("List") and isinstance(document.get("items").value, list):
            yield from (item for item in document.get("items") if item.get("kind").text)
        else:
            yield document
