"""Which files are read: those named, those below a directory, standard input; and which of them hold manifests."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmtrain.errors import UsageError
from llmtrain.lint.yaml_nodes import Node, NotAManifest, parse

STDIN = "-"
SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Sources:
    """What was read: the objects of all files together, and the files of a directory that hold none."""

    objects: list[Node]
    files: list[str]
    skipped: list[str]


def read_sources(paths: Sequence[str]) -> Sources:
    """Every manifest below the paths. All files that cannot be read are told at once."""
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
        files.append(_shown(path))
        objects += found
    if problems:
        count = f"{len(problems)} files cannot" if len(problems) > 1 else "One file cannot"
        error = UsageError(f"{count} be read as Kubernetes manifests:\n  " + "\n  ".join(problems))
        error.details["problems"] = problems
        raise error
    if not files:
        raise UsageError(f"No Kubernetes manifest in {', '.join(paths)}.", remedy="Name files with `kind:` in them.")
    return Sources(objects, files, skipped)


class _NoObject(Exception):
    """Sound YAML that is no manifest: an error where the file was named, and passed over in a directory."""


def _files(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, bool]]:
    """(file, whether it was named itself), each once: an object that is read twice would be two."""
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
        elif path.exists():  # a pipe, as of <(helm template ...)
            yield name, True
        else:
            problems.append(f"{name}: there is no such file or directory")


def _shown(path: str) -> str:
    return "<stdin>" if path == STDIN else path


def _read(path: str) -> list[Node]:
    try:
        raw = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
        return parse(raw.decode("utf-8-sig"), _shown(path))
    except UnicodeDecodeError:
        raise NotAManifest("not a text in UTF-8") from None
    except OSError as error:
        raise NotAManifest(error.strerror or str(error)) from None


def objects_of(documents: list[Node]) -> Iterator[Node]:
    """The objects of documents, those of a List one by one."""
    if not documents:
        raise _NoObject(": nothing in it")
    strange = [one for one in documents if not (one.get("kind").text and one.get("apiVersion").text)]
    if strange:
        why, line = "no Kubernetes manifest: `apiVersion` or `kind` is missing", strange[0].line
        raise _NoObject(f":{line}: {why}") if strange == documents else NotAManifest(why, line)
    for document in documents:
        if document.get("kind").text.endswith("List") and isinstance(document.get("items").value, list):
            yield from (item for item in document.get("items") if item.get("kind").text)
        else:
            yield document
