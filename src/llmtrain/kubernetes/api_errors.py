"""Refusals of the API server as errors with a remedy."""

import json
import re
from dataclasses import dataclass

from llmtrain import registry
from llmtrain.config.launch import LaunchSection
from llmtrain.core.redact import redacted_line
from llmtrain.errors import ClusterError, LlmtrainError, UsageError

SUBRESOURCES = {"exec": "exec in", "log": "the log of", "status": "the status of"}


@dataclass(frozen=True)
class Request:
    """A request to the API server, for messages about it."""

    verb: str
    api_version: str
    kind: str
    namespace: str | None
    name: str = ""
    subresource: str = ""

    @property
    def target(self) -> str:
        text = f"{self.kind} {self.name or 'objects'}"
        if self.namespace:
            text += f" in namespace {self.namespace}"
        if self.subresource:
            text = f"{SUBRESOURCES.get(self.subresource, self.subresource)} {text}"
        return text


class KindNotFound(UsageError):
    """The API server does not have this kind: its operator is not installed."""

    def __init__(self, request: Request) -> None:
        operator = _installer_of(request.kind)
        if operator:
            what = f"The {request.kind} CRD ({request.api_version}) is not installed."
            remedy = f"Install {operator}, or use --kind indexed_job, which needs no operator."
        else:
            what = f"The API server does not have {request.kind} in {request.api_version}."
            remedy = "Check the version of the cluster."
        super().__init__(what, remedy=remedy)


def _installer_of(kind: str) -> str | None:
    """What installs a kind that is not part of Kubernetes."""
    for launch_kind in registry.all_kinds():
        if kind in launch_kind.operator_kinds:
            return str(launch_kind.installer)
    return None


class Forbidden(UsageError):
    """Refused by RBAC. `right`: a verb and a resource, as in `kubectl auth can-i`."""

    def __init__(self, right: str, namespace: str | None, options: str = "") -> None:
        where = "in all namespaces"
        option = "--all-namespaces"
        if namespace:
            where = f"in namespace '{namespace}'"
            option = f"-n {namespace}"
        super().__init__(
            f"Not allowed to {right} {where} (RBAC).",
            remedy="Ask an administrator for the Role in docs/rbac.md, or use another --namespace. Check: "
            f"kubectl auth can-i {right} {option}{options}",
        )


class AlreadyExists(UsageError):
    """An object of this name exists."""


def refusal_error(request: Request, status: int, body: str, options: str = "") -> LlmtrainError | None:
    """The error for an HTTP status of 400 or more; None if just the object does not exist. `options`: command-line
    options that select the cluster, for remedies."""
    error = _refusal_error(request, status, _message(body), options)
    if error is not None:
        error.details["status"] = f"HTTP {status}"
    return error


def _refusal_error(request: Request, status: int, message: str, options: str) -> LlmtrainError | None:
    target = request.target
    if status == 404:
        return _not_found(request, message, options)
    if status == 401:
        return ClusterError(
            f"The API server rejected the credentials ({message}).", remedy="Log in again, or select another --context."
        )
    if status == 403:
        return _forbidden(request, message, options)
    if status == 409 and request.verb == "create":
        if "being deleted" in message:
            return AlreadyExists(f"{target} is still being deleted.", remedy="Retry in a moment.")
        return AlreadyExists(f"{target} already exists.", remedy="Use another --name, or resume it: --resume.")
    if status in (400, 422):
        return UsageError(
            f"The API server rejected {target}: {message}",
            remedy="Correct the launch section, and check it with --dry-run=server.",
        )
    if status == 429 or status >= 500:
        return _server_error(request, status, message)
    return ClusterError(
        f"The API server refused to {request.verb} {target} (HTTP {status}): {message}", remedy="Retry."
    )


def _not_found(request: Request, message: str, options: str) -> LlmtrainError | None:
    if missing := re.search(r'namespaces "([^"]+)" not found', message):
        return UsageError(
            f"Namespace {missing[1]} does not exist.",
            remedy=f"Create it (kubectl create namespace {missing[1]}{options}), or use another --namespace.",
        )
    # A missing object is reported as JSON; for an unknown kind the URL itself does not exist.
    if "page not found" in message or "could not find the requested resource" in message:
        return KindNotFound(request)
    return None


def _server_error(request: Request, status: int, message: str) -> ClusterError:
    if "failed calling webhook" in message:
        return ClusterError(
            f"The admission webhook for {request.target} failed: {message}",
            remedy="Check that the operator is running, and retry.",
        )
    if request.subresource in ("exec", "log"):  # the API server asks the kubelet for these
        return ClusterError(
            f"The API server cannot reach {request.target} (HTTP {status}): {message}",
            remedy="The node may be unreachable: check with llmtrain why, and retry.",
        )
    return ClusterError(
        f"The API server failed to {request.verb} {request.target} (HTTP {status}): {message}", remedy="Retry."
    )


def _forbidden(request: Request, message: str, options: str) -> UsageError:
    if (refused := admission_error(request.target, request.namespace, message)) is not None:
        return refused
    if "attempting to grant RBAC permissions not currently held" in message:
        return UsageError(
            f"Not allowed to create {request.target}: it grants permissions that you do not have (RBAC).",
            remedy="Ask an administrator to run this command, or to grant you those permissions.",
        )
    if "is being terminated" in message:
        return UsageError(
            f"Namespace {request.namespace} is being deleted.", remedy="Wait, or use another --namespace."
        )
    if "cannot " in message and "User" in message:
        right = f"{request.verb} {request.kind}"
        found = re.search(r'cannot (\w+) resource "([^"]+)"', message)
        if found is not None:  # it may be a right that the request needs besides
            right = f"{found[1]} {found[2]}"
        return Forbidden(right, request.namespace, options)
    return UsageError(
        f"The API server forbids {request.target}: {message}",
        remedy="Ask an administrator for the reason, or use another --namespace.",
    )


def admission_error(
    target: str, namespace: str | None, message: str, launch: LaunchSection | None = None
) -> UsageError | None:
    """The error for objects or pods that a quota or Pod Security refuses; None if `message` is about something else.
    `launch`: the launch section that the pods come from, for a more precise remedy."""
    if "exceeded quota" in message:
        what = f"A quota of namespace {namespace} refuses {target}: {quota(message)}"
        return UsageError(what, remedy=quota_remedy(message))
    if "violates PodSecurity" in message:
        return UsageError(
            f"Pod Security of namespace {namespace} refuses {target}: {redacted_line(message)}",
            remedy=_security_remedy(message, launch),
        )
    return None


def quota_remedy(message: str) -> str:
    """What to do about a quota, by the resource that exceeds it (`requested: persistentvolumeclaims=1`)."""
    requested = message.partition("requested: ")[2].partition(",")[0]
    if "persistentvolumeclaims" in requested or "storage" in requested:
        own = "Use an existing claim (launch.runs_volume.claim), "
    elif requested.startswith(("count/", "services")):
        own = ""
    else:
        own = "Reduce launch.resources or launch.nodes, "
    remedy = f"{own}delete what is not needed, or ask for more quota."
    return remedy[0].upper() + remedy[1:]


def _security_remedy(message: str, launch: LaunchSection | None) -> str:
    """What to change if Pod Security refuses the pods."""
    if "hostNetwork" in message or "hostPort" in message:
        return "Set launch.host_network to false, or use a namespace that allows it."
    if "hostPath" in message:
        return "Remove the hostPath volume from launch.extra_volumes, or use a namespace that allows it."
    if launch is not None and launch.security != "restricted":
        return f"Remove launch.security: {launch.security}, or use a namespace that allows it."
    if launch is not None and launch.pytorch_master:
        return "Disable launch.pytorch_master: with a Master the operator adds an init container that is not allowed."
    others = [name for name in re.findall(r'container "([^"]+)"', message) if name not in own_containers()]
    if others:
        return f"Give container {others[0]} of launch.pod_patch a securityContext that the namespace allows."
    return "Use another --namespace, or launch.security: restricted (the default), which passes with every --kind."


def own_containers() -> set[str]:
    """Containers of our pods; others come from launch.pod_patch or from a webhook."""
    return {"prefetch", *(kind.container for kind in registry.all_kinds())}


def quota(message: str) -> str:
    """The part of `exceeded quota: q, requested: pods=2, used: pods=1, limited: pods=2` after the colon."""
    found = re.search(r"exceeded quota: (.*)", message)
    if found is not None:
        message = found[1]
    return redacted_line(message)


def _message(body: str) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return redacted_line(body)
    if isinstance(value, dict):
        return redacted_line(value.get("message", ""))
    return redacted_line(body)
