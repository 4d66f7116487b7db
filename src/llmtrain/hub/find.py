"""Finding a model: a directory, or a name on the hub. Everything else works on directories."""

import re
import sys
from pathlib import Path
from typing import Any

from llmtrain.errors import UsageError
from llmtrain.hub.errors import explain_hub_error
from llmtrain.hub.token import clean, hub_token, is_offline

# What transformers needs to load a causal language model. Never a pickle: loading one runs code.
MODEL_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja", "merges.txt", "vocab.txt")
CODE_FILES = ("*.py",)
OTHER_FORMATS = ("original/*", "onnx/*", "consolidated*.safetensors")  # the same weights once more
# In a fetched folder that somebody uploaded; here they would be taken for ours.
NOTES = (".llmtrain-fetch*", ".cache/*")

_ID = re.compile(r"(?!.*(?:--|\.\.))(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_](?:[\w.-]{0,94}\w)?", re.ASCII)


def find_model(
    path: str, revision: str | None, local_files_only: bool, field: str = "model.path", *, code: bool = False
) -> Path:
    """The directory of a model: `path` itself where it is one (then the hub is out of it), else from the hub's cache,
    downloaded first where it is missing. `code`: with the Python files of the repository."""
    folder = _existing_directory(path, field)
    if folder is not None:
        return folder
    check_id(path, f"{field} '{path}' is no directory here, and no name on the hub either.")
    token = hub_token()
    try:
        from huggingface_hub import snapshot_download

        quiet_bars()
        found = snapshot_download(
            path,
            revision=revision,
            token=token,
            local_files_only=local_files_only or is_offline(),
            **file_patterns("model", code),
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
        raise UsageError(clean(f"{field} '{path}' cannot be read: {reason}.")) from None
    if looks_like_path(path):
        raise UsageError(
            clean(f"{field} '{path}' does not exist, or is not a directory."),
            remedy="Name a directory with config.json and *.safetensors in it, or a model on the hub as owner/name.",
        )
    return None


def looks_like_path(reference: str) -> bool:
    """Whether it can only be a path: no name on the hub looks so."""
    is_rooted = reference.startswith(("/", "./", "../", "~")) or reference in (".", "..")
    return is_rooted or reference.endswith("/") or reference.count("/") > 1


def check_id(name: str, what: str) -> None:
    if not _ID.fullmatch(name) or name.endswith(".git"):
        raise UsageError(
            clean(what),
            remedy="A name on the hub is `name` or `owner/name`: letters, digits, '-', '_' and '.', no '--' or '..'.",
        )


def file_patterns(kind: str, code: bool) -> dict[str, Any]:
    """Which files, in the words of the library. Of a dataset: all."""
    if kind == "dataset":
        return {"allow_patterns": ["*"], "ignore_patterns": list(NOTES)}
    allowed = [*MODEL_FILES, *(CODE_FILES if code else ())]
    return {"allow_patterns": allowed, "ignore_patterns": [*OTHER_FORMATS, *NOTES]}


def quiet_bars() -> None:
    """No progress bars into a log file."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]  # public, but lazily so

    if not sys.stderr.isatty():
        disable_progress_bars()
