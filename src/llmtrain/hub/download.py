"""Bringing a repository of the hub into a directory, once, safely, however many processes ask.

A download says in the folder itself how far it is: `.llmtrain-fetch.partial.json` while it goes on, and
`.llmtrain-fetch.json`, written last, once every file is there. Both name the repository, the commit and the files.
"""

import contextlib
import fnmatch
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from filelock import FileLock, Timeout

from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.files import read_json, write_json
from llmtrain.hub.errors import explain_hub_error
from llmtrain.hub.find import check_id, file_patterns, quiet_bars
from llmtrain.hub.token import hub_token
from llmtrain.logs import log, warn

MARKER = ".llmtrain-fetch.json"
PARTIAL = ".llmtrain-fetch.partial.json"
LOCK = ".llmtrain-fetch.lock"
LIBRARY_FOLDER = Path(".cache", "huggingface")

WAIT_FOR_OTHER_SEC = 24 * 3600.0
HUB_TIMEOUT_SEC = 30.0
LEFTOVER_AFTER_SEC = 60.0


@dataclass(frozen=True)
class _Wanted:
    kind: Literal["model", "dataset"]
    repo: str
    revision: str
    code: bool = False

    @property
    def what(self) -> str:
        at = "" if self.revision == "main" else f" at revision '{self.revision}'"
        return f"{self.kind.capitalize()} '{self.repo}'{at}"

    def has_same_repo(self, state: dict[str, Any]) -> bool:
        return (state["kind"], state["repo"]) == (self.kind, self.repo)

    def has_same_revision(self, state: dict[str, Any]) -> bool:
        return self.revision in (state["revision"], state["commit"])


def download_model(
    name: str, revision: str | None, folder: Path, *, force: bool = False, code: bool = False
) -> dict[str, Any]:
    """Bring a model into a folder, once, however many processes ask for it at the same time.

    A folder that is complete is left alone without asking the hub, also where the revision is a branch that has moved
    since. `force` asks, and brings the folder to where the branch is now. `code`: with the Python files."""
    return _download(_Wanted("model", name, revision or "main", code), folder, force)


def download_data(name: str, revision: str | None, folder: Path, *, force: bool = False) -> dict[str, Any]:
    """As download_model, for all files of a dataset."""
    return _download(_Wanted("dataset", name, revision or "main"), folder, force)


def _download(wanted: _Wanted, folder: Path, force: bool) -> dict[str, Any]:
    check_id(wanted.repo, f"'{wanted.repo}' is no name on the hub.")
    try:
        folder = folder.expanduser()
        # Without the lock first: a complete folder may lie on a volume that is read-only here.
        found = None if force else _complete(wanted, folder)
        if found is None:
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder):
                found = None if force else _complete(wanted, folder)  # another process may have just made it so
                if found is None:
                    return _result(_fetch(wanted, folder, force), folder, downloaded=True)
    except LlmtrainError:
        raise
    except Exception as problem:  # the library raises many kinds, few of them its own
        verb = "fetch-model" if wanted.kind == "model" else "fetch-data"
        remedy = f"Run `llmtrain {verb} {wanted.repo} --to DIR` where there is a network, and copy DIR here."
        raise explain_hub_error(problem, wanted.what, remedy) from None
    log("DATA", f"{wanted.what} is complete already in {folder}")
    return _result(found, folder, downloaded=False)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time. The lock lies inside the folder, so that pods which mount just the folder share it."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=1.0)
    except Timeout:
        log("DATA", f"waiting for another process that is downloading into {folder}")
        try:
            lock.acquire(timeout=WAIT_FOR_OTHER_SEC)
        except Timeout:
            raise UsageError(f"Another process has been downloading into {folder} for a day.") from None
    try:
        yield
    finally:
        lock.release()


def _fetch(wanted: _Wanted, folder: Path, force: bool) -> dict[str, Any]:
    """Under the lock: list, make room, download, check, and only then write the marker."""
    from huggingface_hub import snapshot_download

    before = _read_state(folder / MARKER) or _read_state(folder / PARTIAL)
    _check_folder(wanted, folder, before, force)
    # A repair or a resumption stays at the commit it began with; force asks where the branch is now.
    goes_on = before is not None and not force and wanted.has_same_revision(before)
    state = _list_files(wanted, before["commit"] if before is not None and goes_on else wanted.revision)
    _remove_outdated(folder, before, state["files"])
    write_json(folder / PARTIAL, state)
    (folder / MARKER).unlink(missing_ok=True)
    total = sum(file["bytes"] for file in state["files"].values())
    log("DATA", f"downloading {wanted.what} ({len(state['files'])} files, {total / 1e6:.1f} MB) into {folder}")
    quiet_bars()
    snapshot_download(
        wanted.repo,
        repo_type=wanted.kind,
        revision=state["commit"],
        local_dir=folder,
        token=hub_token(),
        **file_patterns(wanted.kind, wanted.code),
    )
    damaged = _damaged(folder, state["files"])
    if damaged:  # where the hub cannot be asked, the library logs a warning and returns what there is
        raise DataError(
            f"{wanted.what} did not arrive whole: {len(damaged)} files are missing or too short, such as {damaged[0]}.",
            remedy="Run the same command again; files that are whole are kept.",
        )
    _remove_leftovers(folder)
    write_json(folder / MARKER, state)
    (folder / PARTIAL).unlink(missing_ok=True)
    return state


def _check_folder(wanted: _Wanted, folder: Path, state: dict[str, Any] | None, force: bool) -> None:
    if state is None:
        # lost+found is in the root of every new ext4 volume.
        others = {path.name for path in folder.iterdir()} - {LOCK, MARKER, PARTIAL, "lost+found"}
        if others and not (folder / LIBRARY_FOLDER).is_dir():
            raise UsageError(
                f"{folder} is not empty, and not a download of this command: it has {min(others)}.",
                remedy="Choose another directory for --to, or empty this one.",
            )
    elif not wanted.has_same_repo(state):
        raise UsageError(
            f"{folder} holds {state['kind']} '{state['repo']}' already, not {wanted.kind} '{wanted.repo}'.",
            remedy="Choose another directory for --to.",
        )
    elif not force and not wanted.has_same_revision(state):
        raise UsageError(
            f"{folder} holds '{state['repo']}' at revision '{state['revision']}', not '{wanted.revision}'.",
            remedy="Choose another directory for --to, or replace it with --again.",
        )


def _list_files(wanted: _Wanted, revision: str) -> dict[str, Any]:
    """The commit a revision is at now, and its files: what a marker holds."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(token=hub_token())
    commit = api.repo_info(wanted.repo, revision=revision, repo_type=wanted.kind, timeout=HUB_TIMEOUT_SEC).sha
    tree = api.list_repo_tree(wanted.repo, recursive=True, revision=commit, repo_type=wanted.kind)
    patterns = file_patterns(wanted.kind, wanted.code)
    files = {
        entry.path: _entry(entry)
        for entry in tree
        if isinstance(entry, RepoFile)
        and _matches(entry.path, patterns["allow_patterns"])
        and not _matches(entry.path, patterns["ignore_patterns"])
    }
    for name in files:
        if not _is_below(name):
            raise DataError(f"{wanted.what} has a file that would lie outside the directory: {name!r:.80}.")
    if not files:
        raise UsageError(f"{wanted.what} has no file that can be used.", known=patterns["allow_patterns"])
    if wanted.kind == "model" and not any(name.endswith(".safetensors") for name in files):
        warn("DATA", f"{wanted.what} has no *.safetensors, and other weights are not fetched: pickles run code")
    return {
        "repo": wanted.repo,
        "kind": wanted.kind,
        "revision": wanted.revision,
        "commit": commit,
        "code": wanted.code,
        "files": files,
    }


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _matches(name: str, patterns: list[str]) -> bool:
    """As the library matches its allow_patterns and ignore_patterns: a * goes across directories."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _entry(file: Any) -> dict[str, Any]:
    """Size and content id of a file on the hub."""
    lfs = file.lfs
    return {"bytes": lfs.size, "id": lfs.sha256} if lfs is not None else {"bytes": file.size, "id": file.blob_id}


def _remove_outdated(folder: Path, before: dict[str, Any] | None, files: dict[str, Any]) -> None:
    """Remove what the library would keep though it is wrong: files of an earlier commit (it keeps them when the hub
    fails to answer for one file, and always when the new commit has none of that name), and damaged ones (it does not
    look at sizes)."""
    old = before["files"] if before else {}
    outdated = {name for name in old if old[name] != files.get(name)} | set(_damaged(folder, files))
    root = folder.resolve()
    for name in sorted(outdated):  # before any is removed; the marker may have come with the folder from elsewhere
        if not _is_below(name) or not (folder / name).parent.resolve().is_relative_to(root):
            raise DataError(
                f"{folder} names a file that lies outside it and would be removed: {name!r:.80}.",
                remedy="Choose another directory for --to.",
            )
    for name in outdated:
        (folder / name).unlink(missing_ok=True)
    _remove_leftovers(folder)


def _remove_leftovers(folder: Path) -> None:
    """Pieces of a killed process's files: the library never goes on with them, nor removes them."""
    for path in (folder / LIBRARY_FOLDER).rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > LEFTOVER_AFTER_SEC:  # the lock may mean nothing on this volume
                path.unlink()


def _damaged(folder: Path, files: dict[str, Any]) -> list[str]:
    """Files that are not there, or not with the size they should have."""

    def size(path: Path) -> int | None:
        try:
            return path.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    return [name for name, file in files.items() if size(folder / name) != file["bytes"]]


def _complete(wanted: _Wanted, folder: Path) -> dict[str, Any] | None:
    """The marker of a folder that holds all of what is wanted."""
    state = _read_state(folder / MARKER)
    if state is None or not wanted.has_same_repo(state) or not wanted.has_same_revision(state):
        return None
    if (wanted.code and not state["code"]) or _damaged(folder, state["files"]):
        return None
    return state


def _read_state(path: Path) -> dict[str, Any] | None:
    """A marker, or None where there is none that makes sense."""
    state = read_json(path)
    keys = {"repo", "kind", "revision", "commit", "code", "files"}
    if not isinstance(state, dict) or not keys <= state.keys() or not isinstance(state["files"], dict):
        return None
    return state if all(isinstance(file, dict) and "bytes" in file for file in state["files"].values()) else None


def _result(state: dict[str, Any], folder: Path, downloaded: bool) -> dict[str, Any]:
    return {
        **{key: state[key] for key in ("repo", "revision", "commit")},
        "to": str(folder),
        "files": len(state["files"]),
        "bytes": sum(file["bytes"] for file in state["files"].values()),
        "downloaded": downloaded,
    }
