"""Input of the linter: files, directories and standard input, and the manifests in them."""

import sys
from collections.abc import Iterator, Sequence
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
            place = path
            if problem.line:
                place = f"{path}:{problem.line}"
            problems.append(f"{place}: {problem}")
            continue
        except _NoObject as problem:
            if is_named:
                problems.append(f"{path}{problem}")
            else:
                skipped.append(path)
            continue
        files.append(_display_name(path))
        objects += found
    if problems:
        files_are = "One file is"
        if len(problems) > 1:
            files_are = f"{len(problems)} files are"
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
                # .git, .terraform and the like, but not a hidden directory that was named itself
                is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.suffix in SUFFIXES and file.is_file() and not is_hidden:
                    yield str(file), False
        elif path.exists():  # a pipe, as in <(helm template ...)
            yield name, True
        else:
            problems.append(f"{name}: no such file or directory")


def _display_name(path: str) -> str:
    if path == STDIN:
        return "<stdin>"
    return path


def _read(path: str) -> list[Node]:
    try:
        if path == STDIN:
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as stream:
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
    others = []
    for document in documents:
        if not document.get("kind").text or not document.get("apiVersion").text:
            others.append(document)
    if others:
        reason = "not a Kubernetes manifest: `apiVersion` or `kind` is missing"
        if others == documents:
            raise _NoObject(f":{others[0].line}: {reason}")
        raise NotAManifest(reason, others[0].line)
    for document in documents:
        if document.get("kind").text.endswith("List") and isinstance(document.get("items").value, list):
            yield from (item for item in document.get("items") if item.get("kind").text)
        else:
            yield document
