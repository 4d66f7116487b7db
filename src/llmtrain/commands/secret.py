"""llmtrain secret: create Secrets for pods from local files."""

import base64
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmtrain.commands.cluster_options import ContextOption, KubeconfigOption, NamespaceOption, connect
from llmtrain.commands.options import JsonOption, show
from llmtrain.errors import LlmtrainError, UsageError
from llmtrain.terminal import say

if TYPE_CHECKING:
    from llmtrain.kubernetes.client import Cluster

app = typer.Typer(help="Create Secrets in the cluster; manifests only refer to them.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Create Secrets in the cluster; manifests only refer to them."""


@app.command("hf-token")
def hf_token_command(
    from_env_file: Annotated[
        str, typer.Option("--from-env-file", help="File with a line HF_TOKEN=...; the token is never printed.")
    ],
    name: Annotated[str, typer.Option(help="Name of the Secret.")] = "hf-token",
    key: Annotated[str, typer.Option(help="Key of the token inside it.")] = "token",
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    json_: JsonOption = False,
) -> None:
    """Create or update the Secret with the Hugging Face token. The token is read from a file, so that it appears in no
    command line, shell history or log."""
    from llmtrain.config.launch import HfTokenSection

    try:
        HfTokenSection(name=name, key=key)
    except ValueError:
        raise UsageError(
            f"--name '{name}' or --key '{key}' is not valid for a Secret.",
            remedy="Use lowercase letters, digits, '-' and '.' in names, letters, digits, '-', '_' and '.' in keys.",
        ) from None
    file = Path(from_env_file).expanduser()
    token = _read_token(file)
    _warn_of(file)
    cluster = connect(kubeconfig, context)
    where = namespace or cluster.namespace
    try:
        action = _put(cluster, where, name, key, token)
    except LlmtrainError as problem:
        if _encoded(token) in str(problem) or token in str(problem):  # a webhook may quote the object
            raise UsageError(f"The API server refused Secret {name} in namespace {where}.") from None
        raise
    config = f"launch.hf_token_secret.name: {name}"
    config += f"\nlaunch.hf_token_secret.key: {key}" if key != "token" else ""
    show(
        json_,
        {"secret": name, "key": key, "namespace": where, "done": action},
        f"Secret {name} in namespace {where} is {action}. In the config:\n{config}",
    )


def _read_token(file: Path) -> str:
    from llmtrain.hub.token import TOKEN_VARIABLES, first_token

    try:
        from dotenv import dotenv_values
    except ImportError:
        raise UsageError(
            "python-dotenv is not installed.", remedy="Install the extra: pip install 'llmtrain[k8s]'."
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


def _warn_of(file: Path) -> None:
    """Warn if others can read the file, or if git would commit it."""
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        _warn(f"{file} is readable by other users (mode {mode:o}). Fix: chmod 600 {file}")
    if _is_in_git(file):
        _warn(f"git does not ignore {file}, so the token may be committed. Add it to .gitignore.")


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


def _put(cluster: "Cluster", namespace: str, name: str, key: str, token: str) -> str:
    from llmtrain.kubernetes.labels import APP_LABEL, COMMON_LABELS, has_labels

    data = {key: _encoded(token)}
    found = cluster.get("v1", "Secret", name, namespace)
    if found is None:
        labels = dict(COMMON_LABELS)
        meta = {"name": name, "namespace": namespace, "labels": labels}
        cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": data})
        return "created"
    if not has_labels(found, APP_LABEL):
        raise UsageError(
            f"Secret {name} in namespace {namespace} already exists and was not created by llmtrain.",
            remedy="Use another --name, or set launch.hf_token_secret to this one if it holds the token.",
        )
    if (found.get("data") or {}).get(key) == data[key]:
        return "unchanged"
    cluster.patch("v1", "Secret", name, namespace, {"data": data})
    return "updated"


def _encoded(token: str) -> str:
    return base64.b64encode(token.encode()).decode()


def _warn(text: str) -> None:
    say(f"warning: {text}", sys.stderr)
