"""The connection settings of a cluster: from a kubeconfig, or inside a pod from its service account."""

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.errors import UsageError
from llmtrain.redact import redacted_line

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
            "The Kubernetes client is not installed.", remedy="Install the extra: pip install 'llmtrain[k8s]'."
        ) from None
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # our errors report retries and failures
    settings = client.Configuration()
    settings.keep_alive = True
    try:
        contexts, current = _contexts(kubeconfig)
    except config.ConfigException as problem:
        if kubeconfig is None and context is None and (_SERVICE_ACCOUNT / "token").exists():
            config.load_incluster_config(settings)
            namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
            return Connection(settings, "the cluster of this pod", namespace)
        raise UsageError(
            f"No usable kubeconfig: {redacted_line(problem)}",
            remedy="Set KUBECONFIG, or name a kubeconfig with --kubeconfig.",
        ) from None
    except Exception as problem:  # YAML errors of many types
        raise UsageError(f"The kubeconfig is not readable: {redacted_line(problem)}") from None
    name = context or current
    if name not in contexts:
        what = f"The kubeconfig has no context '{name}'." if name else "The kubeconfig has no current context."
        raise UsageError(what, known=contexts, remedy="Select one with --context.")
    try:
        config.load_kube_config(kubeconfig, name, settings)
    except Exception as problem:  # missing certificate files, failing credential plugins
        raise UsageError(f"The context {name} is not usable: {redacted_line(problem)}") from None
    selected = {"--kubeconfig": kubeconfig, "--context": context}
    options = "".join(f" {option} {shlex.quote(value)}" for option, value in selected.items() if value)
    return Connection(settings, name, contexts[name].get("namespace") or "default", options)


def _contexts(kubeconfig: str | None) -> tuple[dict[str, dict[str, Any]], str | None]:
    """Contexts by name, and the current one. The client's own function fails without a current context."""
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigMerger

    from kubernetes import config

    location = kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION
    merged = KubeConfigMerger(location).config
    if merged is None:
        raise config.ConfigException(f"{location} does not exist")
    # With several files, some parts are wrapped in a ConfigNode.
    values = getattr(merged, "value", merged)
    listed = getattr(values.get("contexts"), "value", values.get("contexts")) or []
    rows = [getattr(row, "value", row) for row in listed]
    contexts = {row["name"]: getattr(row.get("context"), "value", row.get("context")) or {} for row in rows}
    return contexts, values.get("current-context")
