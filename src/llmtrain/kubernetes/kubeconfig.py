"""The connection settings of a cluster: from a kubeconfig, or inside a pod from its service account."""

import logging
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmtrain.core.install import install_command
from llmtrain.core.redact import redacted_line
from llmtrain.errors import UsageError

DEFAULT_NAMESPACE = "default"
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Connection:
    settings: Any
    """kubernetes.client.Configuration"""
    name: str
    """The context, for messages."""
    namespace: str
    """The default namespace."""
    options: str = ""
    """Command-line options that select the cluster, for commands in messages."""


def load_connection(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """From `kubeconfig`, $KUBECONFIG or ~/.kube/config, or inside a pod from its service account. Sends no request."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise UsageError(
            "The Kubernetes client is not installed.", remedy=f"Install the extra: {install_command('k8s')}"
        ) from None
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # our errors report retries and failures
    settings = client.Configuration()
    settings.keep_alive = True
    if _is_in_pod(kubeconfig, context):
        config.load_incluster_config(settings)
        return Connection(settings, "the cluster of this pod", _pod_namespace())
    selected = read_context(kubeconfig, context)
    if selected is None and has_kubeconfig(kubeconfig):
        raise _no_context("The kubeconfig has no current context.", [])
    if selected is None:
        raise _no_kubeconfig(kubeconfig)
    try:
        config.load_kube_config(_location(kubeconfig), selected.name, settings)
    except Exception as problem:  # missing certificate files, failing credential plugins
        raise UsageError(f"The context {selected.name} is not usable: {redacted_line(problem)}") from None
    options = ""
    for option, value in (("--kubeconfig", kubeconfig), ("--context", context)):
        if value:
            options += f" {option} {shlex.quote(value)}"
    return Connection(settings, selected.name, selected.namespace, options)


@dataclass(frozen=True)
class Context:
    name: str
    namespace: str


def read_context(kubeconfig: str | None = None, context: str | None = None) -> Context | None:
    """The selected context, from the kubeconfig files alone; None if there is none."""
    contexts: dict[str, dict[str, Any]] = {}
    current = None
    try:
        documents = [yaml.safe_load(path.read_bytes()) or {} for path in _files(kubeconfig)]
        for document in documents:  # as in kubectl, the first of several files wins
            current = current or document.get("current-context")
            for row in document.get("contexts") or []:
                contexts.setdefault(str(row["name"]), row.get("context") or {})
    except Exception as problem:  # many types: not YAML, not readable, another structure
        raise UsageError(f"The kubeconfig is not readable: {redacted_line(problem)}") from None
    name = context or current
    if not documents and (kubeconfig or context):
        raise _no_kubeconfig(kubeconfig)
    if not name:
        return None
    if name not in contexts:
        raise _no_context(f"The kubeconfig has no context '{name}'.", contexts)
    return Context(name, contexts[name].get("namespace") or DEFAULT_NAMESPACE)


def default_context(kubeconfig: str | None = None, context: str | None = None) -> tuple[str | None, str]:
    """Name and namespace of the context that a command would use, without contacting a cluster. Without a kubeconfig:
    (None, the namespace of this pod, or `default`)."""
    if _is_in_pod(kubeconfig, context):
        return None, _pod_namespace()
    selected = read_context(kubeconfig, context)
    if selected is None:
        return None, DEFAULT_NAMESPACE
    return selected.name, selected.namespace


def has_kubeconfig(kubeconfig: str | None) -> bool:
    return bool(_files(kubeconfig))


def _location(kubeconfig: str | None) -> str:
    return kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"


def _files(kubeconfig: str | None) -> list[Path]:
    """The files that exist: $KUBECONFIG may list several, and those that are missing do not count."""
    paths = [Path(text).expanduser() for text in _location(kubeconfig).split(os.pathsep) if text]
    return [path for path in paths if path.exists()]


def _is_in_pod(kubeconfig: str | None, context: str | None) -> bool:
    """Whether the service account of this pod is to be used: only if nothing selects another cluster."""
    if kubeconfig is not None or context is not None or has_kubeconfig(None):
        return False
    return (_SERVICE_ACCOUNT / "token").exists()


def _pod_namespace() -> str:
    return (_SERVICE_ACCOUNT / "namespace").read_text().strip()


def _no_context(what: str, known: Iterable[str]) -> UsageError:
    return UsageError(what, known=known, remedy="Select one with --context.")


def _no_kubeconfig(kubeconfig: str | None) -> UsageError:
    looked = "~/.kube/config"
    if kubeconfig:
        looked = f"--kubeconfig {kubeconfig}"
    elif os.environ.get("KUBECONFIG"):
        looked = f"KUBECONFIG={os.environ['KUBECONFIG']}"
    return UsageError(
        f"No kubeconfig found (looked at {looked}).", remedy="Set KUBECONFIG, or name a kubeconfig with --kubeconfig."
    )
