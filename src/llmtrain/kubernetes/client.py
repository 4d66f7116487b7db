"""The cluster: the only file that imports the Kubernetes client (extra `k8s`).

The client reads the kubeconfig, logs in and holds the connections; what is sent are plain dictionaries, as in the
manifests. Whatever goes wrong comes out as one of our errors: a ClusterError when the cluster cannot be reached or does
not answer, a UsageError when it says no.
"""

import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import Missing, NotAllowed, Request, explain_refusal, one_line
from llmtrain.kubernetes.exec import MESSAGE_BYTES, STDOUT, PodProcess, connect_within
from llmtrain.kubernetes.server_clock import note_date

Object = dict[str, Any]
Labels = dict[str, str | None]

CONNECT_SEC = 5.0
ANSWER_SEC = 60.0
EXEC_SEC = 45.0  # to start a command in a pod: the API server gives up on a lost machine after 30 s, and says so
GLIMPSE_SEC = 5.0  # for the end of a log: asked of machines that may be lost, by people who wait
SILENCE_SEC = 120.0  # of a log that is followed: whoever follows it goes on where it was
FIELD_MANAGER = "llmtrain"
NODE_LOST = "NodeLost"
"""Why a pod has failed that we gave up."""
PLURALS = {
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "Event": "events",
    "Job": "jobs",
    "JobSet": "jobsets",
    "LocalQueue": "localqueues",
    "NetworkPolicy": "networkpolicies",
    "PersistentVolume": "persistentvolumes",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PodMetrics": "pods",
    "PyTorchJob": "pytorchjobs",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "Secret": "secrets",
    "SelfSubjectAccessReview": "selfsubjectaccessreviews",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "StatefulSet": "statefulsets",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "Workload": "workloads",
}
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Cluster:
    def __init__(self, settings: Any, name: str, namespace: str, options: str = "") -> None:
        from kubernetes import client

        self.name = name
        """The context it was reached by, for people."""
        self.namespace = namespace
        """Where commands look unless told otherwise."""
        self.options = options
        """How it was named on the command line, for hints that can be typed."""
        self._settings = settings
        self._pool = client.ApiClient(settings).rest_client.pool_manager

    @classmethod
    def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> "Cluster":
        """By a kubeconfig (the one given, $KUBECONFIG, ~/.kube/config), or, inside a pod, by its service account.
        Nothing is asked yet."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise UsageError(
                "The Kubernetes client is not installed.", remedy="Install the extra: pip install 'llmtrain[k8s]'."
            ) from None
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # we say ourselves what went wrong
        settings = client.Configuration()
        settings.keep_alive = True
        try:
            contexts, current = _contexts(kubeconfig)
        except config.ConfigException as problem:
            if kubeconfig is None and context is None and (_ACCOUNT / "token").exists():
                config.load_incluster_config(settings)
                return cls(settings, "the cluster of this pod", (_ACCOUNT / "namespace").read_text().strip())
            raise UsageError(
                f"No cluster is known: {one_line(problem)}", remedy="Name a kubeconfig with --kubeconfig or KUBECONFIG."
            ) from None
        except Exception as problem:  # what a YAML reader says
            raise UsageError(f"The kubeconfig cannot be read: {one_line(problem)}") from None
        name = context or current
        if name not in contexts:
            what = f"The kubeconfig has no context '{name}'." if name else "The kubeconfig names no current context."
            raise UsageError(what, known=contexts, remedy="Name one with --context.")
        try:
            config.load_kube_config(kubeconfig, name, settings)
        except Exception as problem:  # certificates that are no files, log-in programs that fail
            raise UsageError(f"The context {name} cannot be used: {one_line(problem)}") from None
        given = {"--kubeconfig": kubeconfig, "--context": context}
        options = "".join(f" {option} {shlex.quote(value)}" for option, value in given.items() if value)
        return cls(settings, name, contexts[name].get("namespace") or "default", options)

    def place(self, namespace: str) -> str:
        """The options that lead there again: every command that a message names ends with them, llmtrain's and
        kubectl's, which has the same ones."""
        return ("" if namespace == self.namespace else f" -n {namespace}") + self.options

    def get(self, api_version: str, kind: str, name: str, namespace: str | None) -> Object | None:
        """An object, or None where there is none of that name. No namespace: one of the cluster as a whole."""
        return self._json(Request("get", api_version, kind, namespace, name))

    def find(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        labels: Labels | None = None,
        fields: dict[str, str] | None = None,
    ) -> list[Object]:
        """Objects of a namespace, or of all. A label without a value: whatever its value."""
        query = {
            "labelSelector": ",".join(
                key if value is None else f"{key}={value}" for key, value in (labels or {}).items()
            ),
            "fieldSelector": ",".join(f"{key}={value}" for key, value in (fields or {}).items()),
        }
        found = self._json(Request("list", api_version, kind, namespace), query) or {}
        # The items of a list do not say again what they are.
        return [{"apiVersion": api_version, "kind": kind, **item} for item in found.get("items") or []]

    def create(self, manifest: Object, dry_run: bool = False) -> Object:
        """Make an object; a field it does not have is an error. `dry_run`: the server checks it and keeps nothing."""
        meta = manifest["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict", "dryRun": "All" if dry_run else ""}
        request = Request("create", manifest["apiVersion"], manifest["kind"], meta.get("namespace"), meta["name"])
        made = self._json(request, query, manifest)
        if made is None:
            raise Missing(request)
        return made

    def check_right(self, verb: str, manifest: Object) -> None:
        """Refused where we may not do that with such an object: asked before changes that cannot be taken back."""
        version, kind, namespace = manifest["apiVersion"], manifest["kind"], manifest["metadata"]["namespace"]
        group = version.rpartition("/")[0]
        asked = {"verb": verb, "group": group, "resource": PLURALS[kind], "namespace": namespace}
        request = Request("create", "authorization.k8s.io/v1", "SelfSubjectAccessReview", None)
        review = {"apiVersion": request.api_version, "kind": request.kind, "spec": {"resourceAttributes": asked}}
        try:
            answer = self._json(request, body=review)
        except UsageError:  # not everywhere may one ask: trying tells
            return
        if answer is not None and not answer["status"].get("allowed"):
            raise NotAllowed(f"{verb} {PLURALS[kind]}", namespace, self.options)

    def patch(self, api_version: str, kind: str, name: str, namespace: str, change: Object) -> Object | None:
        """Merge a change into an object; None where there is none."""
        request = Request("patch", api_version, kind, namespace, name)
        return self._json(request, {"fieldManager": FIELD_MANAGER}, change)

    def give_up_pod(self, name: str, namespace: str, uid: str, why: str) -> bool:
        """Mark a pod as failed in place of its machine, which cannot any more, then remove it. False where it is gone,
        or another has its name by now."""
        status = {"phase": "Failed", "reason": NODE_LOST, "message": why}
        try:
            marked = self._json(
                Request("patch", "v1", "Pod", namespace, name, "status"),
                body={"metadata": {"uid": uid}, "status": status},
            )
            was_there = self.delete("v1", "Pod", name, namespace, grace_sec=0, uid=uid)
        except LlmtrainError as problem:
            if problem.details.get("status") == "HTTP 409":
                return False
            raise
        return marked is not None or was_there

    def note_on_pod(self, name: str, namespace: str, uid: str, notes: dict[str, str]) -> None:
        """Annotations, by way of the status: the right to that cannot change what a pod runs."""
        request = Request("patch", "v1", "Pod", namespace, name, "status")
        self._json(request, body={"metadata": {"uid": uid, "annotations": notes}})

    def delete(
        self,
        api_version: str,
        kind: str,
        name: str,
        namespace: str,
        grace_sec: int | None = None,
        uid: str | None = None,
        resource_version: str | None = None,
    ) -> bool:
        """Remove an object and, in the background, what belongs to it. False where there was none. `uid`: only that
        very one; `resource_version`: only as it was then."""
        options: Object = {"propagationPolicy": "Background"}
        options |= {"gracePeriodSeconds": grace_sec} if grace_sec is not None else {}
        options |= {"preconditions": {"uid": uid}} if uid is not None else {}
        if resource_version is not None:
            options.setdefault("preconditions", {})["resourceVersion"] = resource_version
        return self._json(Request("delete", api_version, kind, namespace, name), body=options) is not None

    def log(
        self,
        pod: str,
        namespace: str,
        container: str,
        *,
        tail: int | None = None,
        previous: bool = False,
        follow: bool = False,
        since: str | None = None,
        timestamps: bool = False,
    ) -> Iterator[str]:
        """Lines of a container's log; none where it has not started or is gone. `since`: a time as Kubernetes writes
        it."""
        query = {
            "container": container,
            "tailLines": "" if tail is None else str(tail),
            "previous": "true" if previous else "",
            "follow": "true" if follow else "",
            "sinceTime": since or "",
            "timestamps": "true" if timestamps else "",
        }
        request = Request("get", "v1", "Pod", namespace, pod, "log")
        try:
            patience = SILENCE_SEC if follow else ANSWER_SEC if tail is None else GLIMPSE_SEC
            response = self._send(request, query, None, patience)
        except UsageError as refused:
            if refused.details.get("status") == "HTTP 400":  # it waits to start, or there is no previous one
                return
            raise
        if response is None:
            return
        with closing(response):
            yield from _lines(response, request, self.name)

    def run(self, pod: str, namespace: str, container: str, command: list[str]) -> Iterator[bytes]:
        """What a command in a pod writes to standard output, as it comes. Ends in an error if the command fails."""
        complaint = b""
        with closing(self.start(pod, namespace, container, command)) as process:
            for channel, data in process.output():
                if channel == STDOUT:
                    yield data
                else:
                    complaint = (complaint + data)[-MESSAGE_BYTES:]
        process.check(complaint)

    def start(self, pod: str, namespace: str, container: str, command: list[str], stdin: bool = False) -> PodProcess:
        """A command in a pod."""
        from kubernetes.stream.ws_client import create_websocket

        found = self.get("v1", "Pod", pod, namespace)
        if found is None or found.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            raise ClusterError(f"There is no pod {pod} in namespace {namespace} any more.")
        request = Request("create", "v1", "Pod", namespace, pod, "exec")
        words = [("container", container), ("stdout", "true"), ("stderr", "true")]
        words += [("stdin", "true")] if stdin else []
        words += [("command", word) for word in command]
        host = "ws" + self._settings.host.removeprefix("http")
        try:
            headers = {row["key"].lower(): row["value"] for row in self._settings.auth_settings().values()}
            address = f"{host}{_path(request)}?{urlencode(words)}"
            socket = connect_within(EXEC_SEC, lambda: create_websocket(self._settings, address, headers))
            socket.settimeout(ANSWER_SEC)
        except Exception as problem:
            status = getattr(problem, "status_code", None)
            if isinstance(status, int) and status >= 400:
                body = getattr(problem, "resp_body", None) or b""
                gone = ClusterError(f"There is no pod {pod} in namespace {namespace} any more.")
                raise explain_refusal(request, status, body.decode("utf-8", "replace"), self.options) or gone from None
            raise self._unreachable(problem) from None
        return PodProcess(socket, pod, self._unreachable)

    def usage(self, namespace: str, labels: Labels) -> dict[str, dict[str, dict[str, str]]] | None:
        """What containers use now: pod -> container -> {"cpu": ..., "memory": ...}, as quantities. None where the
        cluster does not measure that, or not for us."""
        try:
            rows = self.find("metrics.k8s.io/v1beta1", "PodMetrics", namespace, labels)
        except LlmtrainError:
            return None
        return {
            row["metadata"]["name"]: {c["name"]: c.get("usage", {}) for c in row.get("containers", [])} for row in rows
        }

    def _json(self, request: Request, query: dict[str, str] | None = None, body: Object | None = None) -> Object | None:
        response = self._send(request, query or {}, body, ANSWER_SEC)
        if response is None:
            return None
        try:
            found = json.loads(response.read())
        except ValueError:
            raise self._no_api_server() from None
        except Exception as problem:  # the line broke
            raise self._unreachable(problem) from None
        if not _is_answer(request, found):
            raise self._no_api_server()
        return found  # type: ignore[no-any-return]

    def _send(self, request: Request, query: dict[str, str], body: Object | None, patience_sec: float) -> Any:
        """The answer to a request, unread; None where the object is not there."""
        import urllib3

        method = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}[request.verb]
        words = urlencode({key: value for key, value in query.items() if value})
        url = f"{self._settings.host}{_path(request)}{'?' + words if words else ''}"
        headers = {"Accept": "application/json, */*", "User-Agent": "llmtrain"}
        headers["Content-Type"] = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            for setting in self._settings.auth_settings().values():
                headers[setting["key"]] = setting["value"]
            response = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_SEC, read=patience_sec),
                retries=urllib3.Retry(1 if method == "GET" else 0, redirect=0, status=0, raise_on_status=False),
                preload_content=False,
            )
            note_date(response.headers.get("Date"))
            if response.status < 400:
                return response
            text = response.read().decode("utf-8", "replace")
        except Exception as problem:  # urllib3 raises many kinds, log-in programs any
            raise self._unreachable(problem) from None
        refused = explain_refusal(request, response.status, text, self.options)
        if refused is None:
            return None
        raise refused

    def _no_api_server(self) -> ClusterError:
        return ClusterError(
            f"{self._settings.host} (context {self.name}) does not answer like a Kubernetes API server.",
            remedy="Check the server's address in the kubeconfig, and whether a proxy answers in its place. Another "
            "context is named by --context.",
        )

    def _unreachable(self, problem: Exception) -> ClusterError:
        reason = getattr(problem, "reason", None) or problem
        return ClusterError(
            f"The cluster of context {self.name} ({self._settings.host}) does not answer: {one_line(reason)}",
            remedy=f"Is it up, and does `kubectl get nodes{self.options}` reach it from here? Another context is named "
            "by --context.",
        )


def _contexts(kubeconfig: str | None) -> tuple[dict[str, Object], str | None]:
    """Contexts by name, and the current one. The client's own list wants a current one to be there."""
    from kubernetes.config.kube_config import KUBE_CONFIG_DEFAULT_LOCATION, KubeConfigMerger

    from kubernetes import config

    merged = KubeConfigMerger(kubeconfig or KUBE_CONFIG_DEFAULT_LOCATION).config
    if merged is None:
        raise config.ConfigException("there is no kubeconfig")
    # Of several files, some parts are wrapped once more.
    values = getattr(merged, "value", merged)
    listed = getattr(values.get("contexts"), "value", values.get("contexts")) or []
    rows = [getattr(row, "value", row) for row in listed]
    contexts = {row["name"]: getattr(row.get("context"), "value", row.get("context")) or {} for row in rows}
    return contexts, values.get("current-context")


def _is_answer(request: Request, found: object) -> bool:
    """Whether an API server would say that: an object, or a list of objects."""
    if not isinstance(found, dict):
        return False
    if request.verb == "delete":  # it may answer with a Status
        return bool(found)
    if request.verb != "list":
        part = "status" if request.kind == "SelfSubjectAccessReview" else "metadata"
        return isinstance(found.get(part), dict)
    items = found.get("items", ())
    return items is None or (
        isinstance(items, list)
        and all(isinstance(item, dict) and isinstance(item.get("metadata"), dict) for item in items)
    )


def _path(request: Request) -> str:
    group = "/api/v1" if request.api_version == "v1" else f"/apis/{request.api_version}"
    place = f"/namespaces/{quote(request.namespace)}" if request.namespace is not None else ""
    is_inside = request.part or request.verb != "create"
    name = f"/{quote(request.name)}" if request.name and is_inside else ""
    part = f"/{request.part}" if request.part else ""
    return f"{group}{place}/{PLURALS[request.kind]}{name}{part}"


def _lines(response: Any, request: Request, cluster: str) -> Iterator[str]:
    rest = b""
    try:
        for piece in response.stream(amt=2**14):
            *whole, rest = (rest + piece).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in whole)
    except GeneratorExit:
        raise
    except Exception as problem:
        raise ClusterError(f"The log of {request.name} broke off ({cluster}): {one_line(problem)}") from None
    if rest:
        yield rest.decode("utf-8", "replace")
