"""Downloads a repository of the hub into a directory once, also if several processes request it.

The directory records its state: `.llmtrain-fetch.partial.json` during a download, and `.llmtrain-fetch.json` once every
file is complete. Both contain the repository, the commit and the files.
"""

import contextlib
import fnmatch
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from filelock import FileLock, Timeout

from llmtrain.core.files import read_json, write_json
from llmtrain.core.logs import log, warn
from llmtrain.core.text import format_bytes, plural
from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.hub.errors import explain_hub_error
from llmtrain.hub.find import check_id, file_patterns, quiet_bars
from llmtrain.hub.token import hub_token

MARKER = ".llmtrain-fetch.json"
PARTIAL = ".llmtrain-fetch.partial.json"
LOCK = ".llmtrain-fetch.lock"
LIBRARY_DIR = Path(".cache", "huggingface")

WAIT_FOR_OTHER_SEC = 24 * 3600.0  # a model of 1 TB at 12 MB/s
HUB_TIMEOUT_SEC = 30.0
LEFTOVER_AFTER_SEC = 60.0  # a download that is alive writes more often


@dataclass(frozen=True)
class _Request:
    kind: Literal["model", "dataset"]
    repo: str
    revision: str
    code: bool = False
    remedy: str | None = None
    """What to do offline."""

    @property
    def what(self) -> str:
        name = f"{self.kind.capitalize()} '{self.repo}'"
        if self.revision == "main":
            return name
        return f"{name} at revision '{self.revision}'"

    def has_same_repo(self, state: dict[str, Any]) -> bool:
        return (state["kind"], state["repo"]) == (self.kind, self.repo)

    def has_same_revision(self, state: dict[str, Any]) -> bool:
        return self.revision in (state["revision"], state["commit"])


def download_model(
    name: str, revision: str | None, directory: Path, *, force: bool = False, code: bool = False
) -> dict[str, Any]:
    """Download a model into a directory, once, also if several processes request it.

    A complete directory is not changed and the hub is not contacted, even if the revision is a branch that has moved.
    `force` updates it to the current commit of the branch. `code`: include the Python files."""
    return _download(_Request("model", name, revision or "main", code), directory, force)


def download_data(
    name: str, revision: str | None, directory: Path, *, force: bool = False, remedy: str | None = None
) -> dict[str, Any]:
    """Like download_model, for all files of a dataset. `remedy`: what to do if the hub cannot be reached."""
    return _download(_Request("dataset", name, revision or "main", remedy=remedy), directory, force)


def fetched_model(directory: Path) -> tuple[str, str] | None:
    """(name, commit) of the model that was downloaded into a directory; None for a directory from elsewhere."""
    state = _read_state(directory / MARKER)
    if state is None or state["kind"] != "model":
        return None
    return str(state["repo"]), str(state["commit"])


def _download(request: _Request, directory: Path, force: bool) -> dict[str, Any]:
    check_id(request.repo, f"'{request.repo}' is not a valid name on the hub.")
    try:
        directory = directory.expanduser()
        # First without the lock: a complete directory may be on a read-only volume.
        state = _complete(request, directory, force)
        if state is None:
            directory.mkdir(parents=True, exist_ok=True)
            with _exclusive(directory):
                state = _complete(request, directory, force)  # another process may have completed it
                if state is None:
                    return _result(_fetch(request, directory, force), directory, downloaded=True)
    except LlmtrainError:
        raise
    except Exception as problem:  # the library raises many types, few of them its own
        verb = "fetch-model" if request.kind == "model" else "fetch-data"
        remedy = f"Run `llmtrain {verb} {request.repo} --to DIR` on a machine with network access, and copy DIR here."
        raise explain_hub_error(problem, request.what, request.remedy or remedy) from None
    log("DATA", f"{request.what} is already complete in {directory}")
    return _result(state, directory, downloaded=False)


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """One process at a time. The lock is inside the directory, so that pods that mount only the directory share it."""
    lock = FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        log("DATA", f"waiting for another process that is downloading into {directory}")
        try:
            lock.acquire(timeout=WAIT_FOR_OTHER_SEC)
        except Timeout:
            raise UsageError(f"Another process has been downloading into {directory} for 24 hours.") from None
    try:
        yield
    except BaseException:
        # Nothing to resume: the directory is left as it was. A process that waits for the removed file takes a new one.
        if not (directory / MARKER).exists() and not (directory / PARTIAL).exists():
            (directory / LOCK).unlink(missing_ok=True)
        raise
    finally:
        lock.release()


def _fetch(request: _Request, directory: Path, force: bool) -> dict[str, Any]:
    """Under the lock: list the files, remove outdated ones, download, verify, and write the marker last."""
    from huggingface_hub import snapshot_download

    before = _read_state(directory / MARKER) or _read_state(directory / PARTIAL)
    _check_directory(request, directory, before, force)
    # A repaired or resumed download keeps its commit; force uses the current commit of the branch.
    revision = request.revision
    if before is not None and not force and request.has_same_revision(before):
        revision = before["commit"]
    state = _list_files(request, revision)
    _remove_outdated(directory, before, state["files"])
    write_json(directory / PARTIAL, state)
    (directory / MARKER).unlink(missing_ok=True)
    total = sum(file["bytes"] for file in state["files"].values())
    log(
        "DATA",
        f"downloading {request.what} ({plural(len(state['files']), 'file')}, {format_bytes(total)}) into {directory}",
    )
    quiet_bars(f"downloading {request.what}")
    snapshot_download(
        request.repo,
        repo_type=request.kind,
        revision=state["commit"],
        local_dir=directory,
        token=hub_token(),
        **file_patterns(request.kind, request.code),
    )
    damaged = _damaged(directory, state["files"])
    if damaged:  # if the hub is unreachable, the library logs a warning and returns the existing files
        raise DataError(
            f"The download of {request.what} is incomplete: {plural(len(damaged), 'file')} missing or too short, such "
            f"as {damaged[0]}.",
            remedy="Run the same command again; complete files are kept.",
        )
    _remove_leftovers(directory)
    write_json(directory / MARKER, state)
    (directory / PARTIAL).unlink(missing_ok=True)
    return state


def _check_directory(request: _Request, directory: Path, state: dict[str, Any] | None, force: bool) -> None:
    if state is None:
        # Every new ext4 volume has a lost+found in its root.
        others = {path.name for path in directory.iterdir()} - {LOCK, MARKER, PARTIAL, "lost+found"}
        if others and not (directory / LIBRARY_DIR).is_dir():
            raise UsageError(
                f"{directory} is not empty and was not created by this command: it contains {min(others)}.",
                remedy="Choose another directory for --to, or empty this one.",
            )
    elif not request.has_same_repo(state):
        raise UsageError(
            f"{directory} contains {state['kind']} '{state['repo']}', not {request.kind} '{request.repo}'.",
            remedy="Choose another directory for --to.",
        )
    elif not force and not request.has_same_revision(state):
        raise UsageError(
            f"{directory} contains '{state['repo']}' at revision '{state['revision']}', not '{request.revision}'.",
            remedy="Choose another directory for --to, or replace it with --again.",
        )


def _list_files(request: _Request, revision: str) -> dict[str, Any]:
    """The content of a marker: the current commit of a revision, and its files."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(token=hub_token())
    commit = api.repo_info(request.repo, revision=revision, repo_type=request.kind, timeout=HUB_TIMEOUT_SEC).sha
    tree = api.list_repo_tree(request.repo, recursive=True, revision=commit, repo_type=request.kind)
    patterns = file_patterns(request.kind, request.code)
    files = {}
    for entry in tree:
        if not isinstance(entry, RepoFile) or not _matches(entry.path, patterns["allow_patterns"]):
            continue
        if _matches(entry.path, patterns["ignore_patterns"]):
            continue
        if not _is_below(entry.path):
            raise DataError(f"{request.what} has a file with a path outside the directory: {entry.path!r:.80}.")
        files[entry.path] = _entry(entry)
    if not files:
        raise UsageError(f"{request.what} has no usable file.", known=patterns["allow_patterns"])
    if request.kind == "model" and not any(name.endswith(".safetensors") for name in files):
        warn("DATA", f"{request.what} has no *.safetensors; other weight formats are not downloaded (pickles run code)")
    return {
        "repo": request.repo,
        "kind": request.kind,
        "revision": request.revision,
        "commit": commit,
        "code": request.code,
        "files": files,
    }


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _matches(name: str, patterns: list[str]) -> bool:
    """Match as the library matches allow_patterns and ignore_patterns: * also matches slashes."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _entry(file: Any) -> dict[str, Any]:
    """Size and content id of a file on the hub."""
    if file.lfs is not None:
        return {"bytes": file.lfs.size, "id": file.lfs.sha256}
    return {"bytes": file.size, "id": file.blob_id}


def _remove_outdated(directory: Path, before: dict[str, Any] | None, files: dict[str, Any]) -> None:
    """Remove wrong files that the library would keep: those of an earlier commit (kept if the hub fails to answer for a
    file, or if the new commit has no such file), and damaged ones (it does not check sizes)."""
    outdated = set(_damaged(directory, files))
    if before is not None:
        for name, file in before["files"].items():
            if file != files.get(name):
                outdated.add(name)
    root = directory.resolve()
    for name in sorted(outdated):  # checked before any is removed: the marker may be from an untrusted source
        if not _is_below(name) or not (directory / name).parent.resolve().is_relative_to(root):
            raise DataError(
                f"The marker in {directory} lists a file outside the directory, which would be removed: {name!r:.80}.",
                remedy="Choose another directory for --to.",
            )
    for name in outdated:
        (directory / name).unlink(missing_ok=True)
    _remove_leftovers(directory)


def _remove_leftovers(directory: Path) -> None:
    """Remove partial files of killed processes: the library neither resumes nor removes them."""
    for path in (directory / LIBRARY_DIR).rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LEFTOVER_AFTER_SEC:  # the volume may not support locks
                path.unlink()


def _damaged(directory: Path, files: dict[str, Any]) -> list[str]:
    """Files that are missing or have another size. Hashing a model would take minutes at each start."""
    damaged = []
    for name, file in files.items():
        try:
            size = (directory / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            size = None
        if size != file["bytes"]:
            damaged.append(name)
    return damaged


def _complete(request: _Request, directory: Path, force: bool) -> dict[str, Any] | None:
    """The marker of a directory that contains all requested files; None with `force`, which asks the hub again."""
    if force:
        return None
    state = _read_state(directory / MARKER)
    if state is None or not request.has_same_repo(state) or not request.has_same_revision(state):
        return None
    if (request.code and not state["code"]) or _damaged(directory, state["files"]):
        return None
    return state


def _read_state(path: Path) -> dict[str, Any] | None:
    """A marker, or None if it is missing or invalid."""
    state = read_json(path)
    keys = {"repo", "kind", "revision", "commit", "code", "files"}
    if not isinstance(state, dict) or not keys <= state.keys() or not isinstance(state["files"], dict):
        return None
    for file in state["files"].values():
        if not isinstance(file, dict) or "bytes" not in file:
            return None
    return state


def _result(state: dict[str, Any], directory: Path, downloaded: bool) -> dict[str, Any]:
    return {
        "repo": state["repo"],
        "revision": state["revision"],
        "commit": state["commit"],
        "to": str(directory),
        "files": len(state["files"]),
        "bytes": sum(file["bytes"] for file in state["files"].values()),
        "downloaded": downloaded,
    }
