"""What a cluster's refusal means, in one sentence with a remedy."""

import json
import re
from dataclasses import dataclass

from llmtrain.config.launch import LaunchSection
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.redact import redacted_line

# Who brings kinds that are not part of Kubernetes.
OPERATORS = {
    "PyTorchJob": "the Kubeflow Training Operator (v1), https://www.kubeflow.org/docs/components/trainer/legacy-v1",
    "TrainJob": "the Kubeflow Trainer (v2), https://www.kubeflow.org/docs/components/trainer",
    "TrainingRuntime": "the Kubeflow Trainer (v2), https://www.kubeflow.org/docs/components/trainer",
    "JobSet": "JobSet, https://jobset.sigs.k8s.io/docs/installation",
}
PARTS = {"exec": "a command in", "log": "the log of", "status": "the status of"}
QUOTA_REMEDY = "Ask for less (launch.resources, launch.nodes), remove what is not needed, or ask for more quota."


@dataclass(frozen=True)
class Request:
    """What was asked for; `part` of an object is its log, or a command in it."""

    verb: str
    api_version: str
    kind: str
    namespace: str | None
    name: str = ""
    part: str = ""

    @property
    def thing(self) -> str:
        where = f" in namespace {self.namespace}" if self.namespace else ""
        whole = f"{self.kind} {self.name}{where}" if self.name else f"{self.kind} objects{where}"
        return f"{PARTS.get(self.part, self.part)} {whole}" if self.part else whole


class Missing(UsageError):
    """The cluster has no such kind of object: an operator is not installed."""

    def __init__(self, request: Request) -> None:
        operator = OPERATORS.get(request.kind)
        super().__init__(
            f"This cluster knows no {request.kind} ({request.api_version}).",
            remedy=f"Install {operator}, or use --kind indexed_job, which needs none."
            if operator
            else "Its version is too old, or too new, for this.",
        )


class NotAllowed(UsageError):
    """The user may not do that; `right`: a verb and a resource."""

    def __init__(self, right: str, namespace: str | None, options: str = "") -> None:
        place, option = "across the whole cluster", "--all-namespaces"
        if namespace:
            place, option = f"in namespace {namespace}", f"-n {namespace}"
        super().__init__(
            f"You have no right to {right} {place}.",
            remedy=f"Ask whoever runs the cluster for it (`kubectl auth can-i {right} {option}{options}` shows it), or "
            "name a --namespace where you have it.",
        )


class AlreadyThere(UsageError):
    """An object of this name exists."""


def explain_refusal(request: Request, status: int, body: str, options: str = "") -> LlmtrainError | None:
    """The error for an HTTP status of 400 and more; None where the object just is not there. `options`: how the cluster
    was named, for commands in remedies."""
    said = _message(body)
    error = _explain(request, status, said, options)
    if error is not None:
        error.details["status"] = f"HTTP {status}"
    return error


def _explain(request: Request, status: int, said: str, options: str) -> LlmtrainError | None:
    thing = request.thing
    if status == 404:
        if found := re.search(r'namespaces "([^"]+)" not found', said):
            return UsageError(
                f"There is no namespace {found[1]}.",
                remedy=f"Make it (kubectl create namespace {found[1]}{options}), or name another with --namespace.",
            )
        # An object that is not there is told in JSON; a kind that is not there is an unknown address.
        is_unknown_kind = "page not found" in said or "could not find the requested resource" in said
        return Missing(request) if is_unknown_kind else None
    if status == 401:
        return ClusterError(
            f"The cluster does not accept your login ({said}).", remedy="Log in again, or name --context."
        )
    if status == 403:
        return _forbidden(request, said, options)
    if status == 409 and request.verb == "create":
        if "being deleted" in said:
            return AlreadyThere(f"{thing} is still being deleted.", remedy="Wait a moment, then try again.")
        return AlreadyThere(f"{thing} exists already.", remedy="Give another --name, or go on with it: --resume.")
    if status in (400, 422):
        return UsageError(
            f"The cluster refuses {thing}: {said}",
            remedy="Correct the launch section; --dry-run=server asks again without making anything.",
        )
    if status == 429 or status >= 500:
        if "failed calling webhook" in said:
            return ClusterError(
                f"{thing} cannot be checked by its operator: {said}", remedy="Is the operator running? Try again soon."
            )
        if request.part in ("exec", "log"):  # only its machine can answer that
            return ClusterError(
                f"The cluster cannot get at {thing} (HTTP {status}): {said}",
                remedy="Its machine may be lost: llmtrain why tells. Else try again.",
            )
        return ClusterError(f"The cluster fails at {request.verb} {thing} (HTTP {status}): {said}", remedy="Try again.")
    return ClusterError(
        f"The cluster refuses to {request.verb} {thing} (HTTP {status}): {said}", remedy="Look at it, and try again."
    )


def _forbidden(request: Request, said: str, options: str) -> UsageError:
    if "exceeded quota" in said:
        return UsageError(
            f"{request.thing} would exceed a quota: {quota(said)}",
            remedy=QUOTA_REMEDY,
        )
    if "violates PodSecurity" in said:
        return UsageError(
            f"The namespace's security rules refuse {request.thing}: {said}",
            remedy="Pods pass `restricted` with launch.security: restricted, the default. Leave out what was added to "
            "them, or name another --namespace.",
        )
    if "attempting to grant RBAC permissions not currently held" in said:
        return UsageError(
            f"You may not make {request.thing}: it gives rights that you do not have yourself.",
            remedy="Nobody can give more than they have. Ask whoever runs the cluster to do this, or for those rights.",
        )
    if "is being terminated" in said:
        return UsageError(f"Namespace {request.namespace} is being deleted.", remedy="Wait, or name --namespace.")
    if "cannot " in said and "User" in said:
        found = re.search(r'cannot (\w+) resource "([^"]+)"', said)
        right = f"{found[1]} {found[2]}" if found else f"{request.verb} {request.kind}"
        return NotAllowed(right, request.namespace, options)
    return UsageError(
        f"The cluster forbids {request.thing}: {said}",
        remedy="Ask whoever runs the cluster for the rule behind it, or name another --namespace.",
    )


def security_remedy(launch: LaunchSection) -> str:
    """What to change where the namespace's Pod Security refuses the pods."""
    if launch.security != "restricted":
        return f"Leave out launch.security: {launch.security}, or use a namespace that allows it"
    if launch.pytorch_master:
        return "Leave launch.pytorch_master off: beside a Master the operator adds a container that breaks them"
    return "Use another namespace, or the pods as llmtrain makes them: all kinds pass `restricted`"


def quota(said: str) -> str:
    """`exceeded quota: q, requested: pods=2, used: pods=1, limited: pods=2` without the rest of the sentence."""
    found = re.search(r"exceeded quota: (.*)", said)
    return one_line(found[1] if found else said)


def one_line(problem: object) -> str:
    return redacted_line(problem, 500)


def _message(body: str) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return one_line(body)
    return one_line(value.get("message", "") if isinstance(value, dict) else body)
