"""The Secret with a Hugging Face token, created from a local file. The token is in no message."""

import base64
import stat
import subprocess
from pathlib import Path

from llmtrain.config.launch import HfTokenSection
from llmtrain.core.install import install_command
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.hub.token import TOKEN_VARIABLES, first_token
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.labels import APP_LABEL, COMMON_LABELS, has_labels


def check_names(name: str, key: str) -> None:
    """Refuse names that Kubernetes does not accept for a Secret or for a key in it."""
    try:
        HfTokenSection(name=name, key=key)
    except ValueError:
        raise UsageError(
            f"--name '{name}' or --key '{key}' is not valid for a Secret.",
            remedy="Use lowercase letters, digits, '-' and '.' in names, letters, digits, '-', '_' and '.' in keys.",
        ) from None


def read_token(file: Path) -> str:
    """The token that an env file sets."""
    try:
        from dotenv import dotenv_values
    except ImportError:
        raise UsageError(
            "python-dotenv is not installed.", remedy=f"Install the extra: {install_command('k8s')}"
        ) from None
    try:
        with file.open(encoding="utf-8") as text:
            values = dotenv_values(stream=text, interpolate=False)  # a token may contain $
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise UsageError(f"{file} is not readable: {reason}.", remedy="Name the file that sets HF_TOKEN.") from None
    token = first_token(values)
    if token is None:
        raise UsageError(f"{file} sets none of {', '.join(TOKEN_VARIABLES)}.", remedy="Add a line HF_TOKEN=... to it.")
    return token


def file_warnings(file: Path) -> list[str]:
    """Whether other users can read the file, or git would commit it."""
    warnings = []
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        warnings.append(f"{file} is readable by other users (mode {mode:o}). Fix: chmod 600 {file}")
    if _is_in_git(file):
        warnings.append(f"git does not ignore {file}, so the token may be committed. Add it to .gitignore.")
    return warnings


def _is_in_git(file: Path) -> bool:
    """Whether it is in a git work tree and not ignored."""
    try:
        # 0: ignored, 1: not ignored, 128: not a work tree
        result = subprocess.run(
            ["git", "check-ignore", "--quiet", "--", str(file.absolute())],
            cwd=file.absolute().parent,
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return result.returncode == 1


def put_token(cluster: Cluster, namespace: str, name: str, key: str, token: str) -> str:
    """Create or update the Secret. Returns what was done: created, updated or unchanged."""
    encoded = base64.b64encode(token.encode()).decode()
    try:
        return _put(cluster, namespace, name, key, encoded)
    except LlmtrainError as problem:
        if encoded in str(problem) or token in str(problem):  # a webhook may quote the object
            raise UsageError(f"The API server refused Secret {name} in namespace {namespace}.") from None
        raise


def _put(cluster: Cluster, namespace: str, name: str, key: str, encoded: str) -> str:
    found = cluster.get("v1", "Secret", name, namespace)
    if found is None:
        meta = {"name": name, "namespace": namespace, "labels": dict(COMMON_LABELS)}
        data = {key: encoded}
        cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": data})
        return "created"
    if not has_labels(found, APP_LABEL):
        raise UsageError(
            f"Secret {name} in namespace {namespace} already exists and was not created by llmtrain.",
            remedy="Use another --name, or set launch.hf_token_secret to this one if it holds the token.",
        )
    if (found.get("data") or {}).get(key) == encoded:
        return "unchanged"
    cluster.patch("v1", "Secret", name, namespace, {"data": {key: encoded}})
    return "updated"
