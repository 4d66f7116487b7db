"""The Hugging Face hub: tokens, finding a model, downloading. Everything else works on directories.

A download says in the folder itself how far it is: `.llmtrain-fetch.partial.json` while it goes on, and
`.llmtrain-fetch.json`, written last, once every file is there. Both name the repository, the commit and the files.
"""

import contextlib
import errno
import fnmatch
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from filelock import FileLock, Timeout

from llmtrain.errors import DataError, LlmtrainError, UsageError
from llmtrain.logs import log, warn
from llmtrain.runs.atomic import read_json, write_json
from llmtrain.runs.redact import redact

# In this order. The hub library knows the first two; people and charts set the third as well.
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")

# What transformers needs to load a causal language model. Never a pickle: loading one runs code.
MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
CODE_FILES = ("*.py",)
OTHER_FORMATS = ("original/*", "onnx/*", "consolidated*.safetensors")  # the same weights once more
# In a fetched folder that somebody uploaded; here they would be taken for ours.
NOTES = (".llmtrain-fetch*", ".cache/*")

MARKER = ".llmtrain-fetch.json"
PARTIAL = ".llmtrain-fetch.partial.json"
LOCK = ".llmtrain-fetch.lock"
LIBRARY_FOLDER = Path(".cache", "huggingface")

WAIT_FOR_OTHER_SEC = 24 * 3600.0
HUB_TIMEOUT_SEC = 30.0
LEFTOVER_AFTER_SEC = 60.0

_ID = re.compile(r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_](?:[\w.-]{0,94}\w)?", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG, errno.ENOTDIR}
_DISK |= {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_SET_A_TOKEN = f"set {TOKEN_VARIABLES[0]} (or {', '.join(TOKEN_VARIABLES[1:])}) to a token of that account."


def hub_token() -> str | None:
    """The token of the environment. None leaves it to the library, which may find a login file."""
    for name, token in _tokens():
        if not _TOKEN.fullmatch(token):
            raise UsageError(
                f"{name} is no token: it has a space, a line break or another character inside that none has.",
                remedy="Set it again; a secret pasted with two lines does this.",
            )
        return token
    return None


def _tokens() -> list[tuple[str, str]]:
    """(variable, stripped value) of each that is set."""
    values = [(name, os.environ.get(name, "").strip()) for name in TOKEN_VARIABLES]
    return [(name, value) for name, value in values if value]


def is_offline() -> bool:
    """Whether the environment forbids asking the hub."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on") for name in names)


def find_model(
    path: str, revision: str | None, local_files_only: bool, field: str = "model.path", *, code: bool = False
) -> Path:
    """The directory of a model: `path` itself where it is one (then the hub is out of it), else from the hub's cache,
    downloaded first where it is missing. `code`: with the Python files of the repository."""
    folder = _existing_directory(path, field)
    if folder is not None:
        return folder
    _check_id(path, f"{field} '{path}' is no directory here, and no name on the hub either.")
    token = hub_token()
    try:
        from huggingface_hub import snapshot_download

        _quiet_bars()
        found = snapshot_download(
            path,
            revision=revision,
            token=token,
            local_files_only=local_files_only or is_offline(),
            **_patterns("model", code),
        )
    except Exception as problem:  # the library raises many kinds, few of them its own
        what = f"{field} '{path}'{f' at revision {revision!r}' if revision else ''} (no directory here)"
        remedy = (
            f"With a network, run `llmtrain fetch-model {path} --to DIR`{' (with --revision)' if revision else ''},"
            f" then set {field} to DIR."
        )
        raise explain_hub_error(problem, what, remedy) from None
    return Path(found)


def _existing_directory(path: str, field: str) -> Path | None:
    try:
        folder = Path(path).expanduser()
        if folder.is_dir():
            return folder
    except (OSError, RuntimeError) as problem:  # not ours to look into; ~somebody who is not known
        reason = getattr(problem, "strerror", None) or problem
        raise UsageError(_clean(f"{field} '{path}' cannot be read: {reason}.")) from None
    if path.startswith(("/", "./", "../", "~")) or path in (".", "..") or path.endswith("/") or path.count("/") > 1:
        raise UsageError(
            _clean(f"{field} '{path}' does not exist, or is not a directory."),
            remedy="Name a directory with config.json and *.safetensors in it, or a model on the hub as owner/name.",
        )
    return None


def _check_id(name: str, what: str) -> None:
    if not _ID.fullmatch(name) or name.endswith(".git"):
        raise UsageError(
            _clean(what),
            remedy="A name on the hub is `name` or `owner/name`: letters, digits, '-', '_' and '.', no '--' or '..'.",
        )


def _patterns(kind: str, code: bool) -> dict[str, Any]:
    """Which files, in the words of the library. Of a dataset: all."""
    if kind == "dataset":
        return {"allow_patterns": ["*"], "ignore_patterns": list(NOTES)}
    allowed = [*MODEL_FILES, *(CODE_FILES if code else ())]
    return {"allow_patterns": allowed, "ignore_patterns": [*OTHER_FORMATS, *NOTES]}


def _quiet_bars() -> None:
    """No progress bars into a log file."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # public, but lazily so

    if not sys.stderr.isatty():
        disable_progress_bars()


# Downloading into a directory.


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
    _check_id(wanted.repo, f"'{wanted.repo}' is no name on the hub.")
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
    _quiet_bars()
    snapshot_download(
        wanted.repo,
        repo_type=wanted.kind,
        revision=state["commit"],
        local_dir=folder,
        token=hub_token(),
        **_patterns(wanted.kind, wanted.code),
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
    patterns = _patterns(wanted.kind, wanted.code)
    files = {
        entry.path: _entry(entry)
        for entry in tree
        if isinstance(entry, RepoFile)
        and _matches(entry.path, patterns["allow_patterns"])
        and not _matches(entry.path, patterns["ignore_patterns"])
    }
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
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
    outdated = [name for name in old if old[name] != files.get(name)]
    for name in {*outdated, *_damaged(folder, files)}:
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


# What went wrong, in our words.

OFFLINE_REMEDY = (
    "With a network, run `llmtrain fetch-model NAME --to DIR` (fetch-data for a dataset), then set model.path to DIR."
)


def explain_hub_error(problem: BaseException, what: str, offline_remedy: str = OFFLINE_REMEDY) -> LlmtrainError:
    """What the hub library raised, as an error of ours; `what` begins its sentence: "Model 'owner/name'". Works for
    what transformers and datasets make of it too: they keep the cause. No token is ever part of it."""
    error: LlmtrainError | None = None
    cause: BaseException | None = problem
    while cause is not None and error is None:
        error = _explain_one(cause, what, offline_remedy)
        cause = cause.__cause__
    if error is None:
        lines = [line for line in str(problem).splitlines() if line.strip()] or [""]
        error = DataError(f"{what} cannot be fetched: {type(problem).__name__}: {lines[0].strip():.300}")
    return type(error)(_clean(error.what), remedy=_clean(error.remedy) if error.remedy else None)


def _explain_one(problem: BaseException, what: str, offline_remedy: str) -> LlmtrainError | None:
    from huggingface_hub import errors

    if isinstance(problem, errors.HfHubHTTPError):
        return _explain_answer(problem, what)
    if isinstance(problem, errors.LocalEntryNotFoundError) and problem.__cause__ is not None:
        return None  # said of any trouble with the hub; the cause knows which
    if isinstance(problem, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return UsageError(
            f"{what} is not in the local cache, and the hub may not be asked (offline).", remedy=offline_remedy
        )
    # By name, since the library has changed what it talks HTTP with (requests, httpx, httpx2).
    by_http = type(problem).__module__.partition(".")[0] in ("httpx2", "httpx", "requests", "urllib3")
    if by_http or isinstance(problem, ConnectionError | TimeoutError):
        reason = " ".join(str(problem).split())[:200] or type(problem).__name__
        return UsageError(f"{what}: the hub cannot be reached: {reason}.", remedy=offline_remedy)
    if isinstance(problem, OSError) and problem.errno in _DISK:
        where = f" ({problem.filename})" if problem.filename else ""
        return UsageError(
            f"{what} cannot be written to disk: {problem.strerror}{where}.",
            remedy="Make room, or choose a directory you may write to. What is there already is kept.",
        )
    return None


def _explain_answer(problem: Any, what: str) -> LlmtrainError:
    """An answer of the hub that is not a yes."""
    from huggingface_hub import errors

    variable = next((name for name, _ in _tokens()), None)
    status = problem.response.status_code
    if isinstance(problem, errors.GatedRepoError):
        if variable:
            return UsageError(
                f"{what} is gated, and the token in {variable} has no access yet.",
                remedy="Accept its licence on its page with the account of that token, and wait until it is granted.",
            )
        return UsageError(
            f"{what} is gated.", remedy=f"Accept its licence on its page while logged in, and {_SET_A_TOKEN}"
        )
    if isinstance(problem, errors.RepositoryNotFoundError):
        if variable:
            return UsageError(
                f"{what} is not on the hub, or is private and the token in {variable} may not see it.",
                remedy="Check the spelling, that the token is still valid, and what its account may read.",
            )
        return UsageError(
            f"{what} is not on the hub, or is private.",
            remedy=f"Check the spelling. To read a private one, {_SET_A_TOKEN}",
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return UsageError(f"{what}: the hub has no such revision.", remedy="Name one of its branches, tags or commits.")
    if status == 401:
        which = f"the token in {variable}" if variable else "the login of the hub library"
        return UsageError(f"{what}: the hub does not accept {which}.", remedy="Make a new token, or unset this one.")
    if status == 429:
        return DataError(f"{what}: the hub has been asked too often (429).", remedy="Try again later, with a token.")
    reason = (problem.server_message or str(problem)).strip().partition("\n")[0][:300]
    return DataError(f"{what} cannot be fetched: the hub answers {status} ({type(problem).__name__}): {reason}")


def _clean(text: str) -> str:
    """Without secrets: also not a token whose variable has white space around it, which redact does not know."""
    for _, token in _tokens():
        if len(token) >= 8:
            text = text.replace(token, "***")
    return redact(text)
