"""Finds the directory of a model: a local one, or one downloaded from the hub."""

import re
import sys
from pathlib import Path
from typing import Any

from llmtrain.core.progress import detail
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.hub.errors import explain_hub_error
from llmtrain.hub.token import hub_token, is_offline, redact_tokens

# The files that transformers needs to load a causal language model. No pickles: loading one runs code.
MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
CODE_FILES = ("*.py",)
OTHER_FORMATS = ("original/*", "onnx/*", "consolidated*.safetensors")  # the same weights again
# Of a downloaded directory that was uploaded; they would be mistaken for markers of this download.
MARKERS = (".llmtrain-fetch*", ".cache/*")

ANSWER_SEC = 5.0

_ID = re.compile(r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_](?:[\w.-]{0,94}\w)?", re.ASCII)


def find_model(
    path: str, revision: str | None, local_files_only: bool, field: str = "model.path", *, code: bool = False
) -> Path:
    """The directory of a model: `path` if it is a directory, else a directory in the cache of the hub, downloaded if
    missing. `code`: include the Python files of the repository."""
    directory = existing_directory(path, field)
    if directory is not None:
        return directory
    check_id(path, f"{field} '{path}' is neither an existing directory nor a valid name on the hub.")
    token = hub_token()
    try:
        from huggingface_hub import snapshot_download

        quiet_bars(path)
        snapshot = snapshot_download(
            path,
            revision=revision,
            token=token,
            local_files_only=local_files_only or is_offline(),
            **file_patterns("model", code),
        )
    except Exception as problem:  # the library raises many types, few of them its own
        what = f"{field} '{path}'"
        command = f"`llmtrain fetch-model {path} --to DIR`"
        if revision:
            what += f" at revision {revision!r}"
            command += " (with --revision)"
        what += " (not a local directory)"
        remedy = f"On a machine with network access, run {command}, then set {field} to DIR."
        raise explain_hub_error(problem, what, remedy) from None
    return Path(snapshot)


def find_model_config(path: str, revision: str | None, local_files_only: bool, field: str = "model.path") -> Path:
    """A directory with the config.json of a model, without its weights: only that file is downloaded if the model is
    neither a directory nor in the cache of the hub."""
    directory = existing_directory(path, field)
    if directory is not None:
        return directory
    try:
        return find_model(path, revision, local_files_only=True, field=field)
    except LlmtrainError:
        if local_files_only or is_offline():
            raise
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

    name = "config.json"
    try:
        # Asked once first: without a network the download is tried again for half a minute.
        get_hf_file_metadata(hf_hub_url(path, name, revision=revision), token=hub_token(), timeout=ANSWER_SEC)
        return Path(hf_hub_download(path, name, revision=revision, token=hub_token())).parent
    except Exception as problem:
        remedy = (
            f"On a machine with network access, run `llmtrain fetch-model {path} --to DIR`, then set {field} to DIR."
        )
        raise explain_hub_error(problem, f"{field} '{path}'", remedy) from None


def existing_directory(path: str, field: str) -> Path | None:
    """`path` if it is a directory, None if it may be a name on the hub; raises for a path that does not exist."""
    try:
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
    except (OSError, RuntimeError) as problem:  # no permission; ~user for an unknown user
        reason = getattr(problem, "strerror", None) or problem
        raise UsageError(redact_tokens(f"{field} '{path}' cannot be read: {reason}.")) from None
    if looks_like_path(path):
        raise UsageError(
            redact_tokens(f"{field} '{path}' does not exist, or is not a directory."),
            remedy="Use a directory with config.json and *.safetensors, or the name of a model on the hub: owner/name.",
        )
    return None


def looks_like_path(reference: str) -> bool:
    """Whether the reference can only be a path, not a name on the hub."""
    is_rooted = reference.startswith(("/", "./", "../", "~")) or reference in (".", "..")
    return is_rooted or reference.endswith("/") or reference.count("/") > 1


def is_id(name: str) -> bool:
    return _ID.fullmatch(name) is not None and not name.endswith(".git")


def check_id(name: str, what: str) -> None:
    if not is_id(name):
        raise UsageError(
            redact_tokens(what),
            remedy="A name on the hub is `name` or `owner/name`: letters, digits, '-', '_' and '.', no '--' or '..'.",
        )


def file_patterns(kind: str, code: bool) -> dict[str, Any]:
    """allow_patterns and ignore_patterns of the library; all files of a dataset."""
    if kind == "dataset":
        return {"allow_patterns": ["*"], "ignore_patterns": list(MARKERS)}
    allowed = list(MODEL_FILES)
    if code:
        allowed += CODE_FILES
    return {"allow_patterns": allowed, "ignore_patterns": [*OTHER_FORMATS, *MARKERS]}


def quiet_bars(what: str) -> None:
    """Disable the library's progress bars without a terminal, and while a live line shows what is being done."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # public, but lazily so

    if detail(what) or not sys.stderr.isatty():
        disable_progress_bars()
