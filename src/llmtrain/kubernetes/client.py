"""Cluster: requests to the API server, with plain dictionaries as in manifests.

The Kubernetes client (extra `k8s`) reads the kubeconfig, authenticates and pools connections. Every failure is raised
as a ClusterError (the API server is unreachable or does not answer) or as a UsageError (it refused the request).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import quote, urlencode

from llmtrain.core.redact import redacted_line
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes.api_errors import Forbidden, KindNotFound, Request, refusal_error
from llmtrain.kubernetes.exec import MESSAGE_BYTES, STDOUT, PodProcess, connect_within
from llmtrain.kubernetes.kubeconfig import load_connection
from llmtrain.kubernetes.server_clock import note_date

Object = dict[str, Any]
Labels = dict[str, str | None]

CONNECT_SEC = 5.0
ANSWER_SEC = 60.0
EXEC_SEC = 45.0  # to start a command in a pod: for an unreachable node the API server reports an error after 30 s
TAIL_SEC = 5.0  # to read the last lines of a log: a user is waiting, and the node may be unreachable
FOLLOW_SEC = 120.0  # without output of a followed log; the caller then reconnects
FIELD_MANAGER = "llmtrain"
_METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}
NODE_LOST = "NodeLost"
"""Status reason of a pod that llmtrain marked as failed because its node is unreachable."""


class Cluster:
    def __init__(self, settings: Any, name: str, namespace: str, options: str = "") -> None:
        from kubernetes import client

        self.name = name
        """The context, for messages."""
        self.namespace = namespace
        """The default namespace."""
        self.options = options
        """Command-line options that select the cluster, for commands in messages."""
        self._settings = settings
        self._pool = client.ApiClient(settings).rest_client.pool_manager

    @classmethod
    def connect(cls, kubeconfig: str | None = None, context: str | None = None) -> "Cluster":
        """Sends no request yet."""
        connection = load_connection(kubeconfig, context)
        return cls(connection.settings, connection.name, connection.namespace, connection.options)

    def place(self, namespace: str) -> str:
        """Command-line options that select this cluster and namespace, for commands in messages: llmtrain and kubectl
        have the same ones."""
        if namespace == self.namespace:
            return self.options
        return f" -n {namespace}{self.options}"

    def get(self, api_version: str, kind: str, name: str, namespace: str | None) -> Object | None:
        """An object, or None if it does not exist. `namespace` None: a cluster-scoped object."""
        return self._json(Request("get", api_version, kind, namespace, name))

    def find(
        self,
        api_version: str,
        kind: str,
        namespace: str | None,
        labels: Labels | None = None,
        fields: dict[str, str] | None = None,
    ) -> list[Object]:
        """Objects of a namespace, or of all namespaces. A label whose value is None must exist."""
        query = {"labelSelector": _selector(labels or {}), "fieldSelector": _selector(fields or {})}
        found = self._json(Request("list", api_version, kind, namespace), query) or {}
        # The items of a list have no apiVersion and kind.
        return [{"apiVersion": api_version, "kind": kind, **item} for item in found.get("items") or []]

    def create(self, manifest: Object, dry_run: bool = False) -> Object:
        """Create an object; unknown fields are an error. `dry_run`: the API server validates it without storing it."""
        meta = manifest["metadata"]
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        request = Request("create", manifest["apiVersion"], manifest["kind"], meta.get("namespace"), meta["name"])
        created = self._json(request, query, manifest)
        if created is None:
            raise KindNotFound(request)
        return created

    def check_right(self, verb: str, manifest: Object) -> None:
        """Raise Forbidden if the user lacks this permission; called before changes that cannot be undone."""
        namespace = manifest["metadata"]["namespace"]
        resource = plural_of(manifest["kind"])
        group = manifest["apiVersion"].rpartition("/")[0]
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        request = Request("create", "authorization.k8s.io/v1", "SelfSubjectAccessReview", None)
        review = {"apiVersion": request.api_version, "kind": request.kind, "spec": {"resourceAttributes": attributes}}
        try:
            answer = self._json(request, body=review)
        except UsageError:  # access reviews may be forbidden; then the change itself fails
            return
        if answer is not None and not answer["status"].get("allowed"):
            raise Forbidden(f"{verb} {resource}", namespace, self.options)

    def patch(self, api_version: str, kind: str, name: str, namespace: str, change: Object) -> Object | None:
        """Apply a JSON merge patch; None if the object does not exist."""
        request = Request("patch", api_version, kind, namespace, name)
        return self._json(request, {"fieldManager": FIELD_MANAGER}, change)

    def fail_pod(self, name: str, namespace: str, uid: str, message: str) -> bool:
        """Mark a pod as failed on behalf of its unreachable node, then delete it. False if it does not exist any more,
        or if another pod has its name."""
        status = {"phase": "Failed", "reason": NODE_LOST, "message": message}
        try:
            marked = self._json(
                Request("patch", "v1", "Pod", namespace, name, "status"),
                body={"metadata": {"uid": uid}, "status": status},
            )
            was_deleted = self.delete("v1", "Pod", name, namespace, grace_sec=0, uid=uid)
        except LlmtrainError as problem:
            if problem.details.get("status") == "HTTP 409":
                return False
            raise
        return marked is not None or was_deleted

    def annotate_pod(self, name: str, namespace: str, uid: str, annotations: dict[str, str]) -> None:
        """Annotate through the status subresource: the permission for that does not allow changing the pod's spec."""
        request = Request("patch", "v1", "Pod", namespace, name, "status")
        self._json(request, body={"metadata": {"uid": uid, "annotations": annotations}})

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
        """Delete an object, and its dependents in the background. False if it does not exist. `uid` and
        `resource_version` are preconditions."""
        options: Object = {"propagationPolicy": "Background"}
        if grace_sec is not None:
            options["gracePeriodSeconds"] = grace_sec
        if uid is not None:
            options["preconditions"] = {"uid": uid}
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
        """Lines of a container's log; none if it has not started or does not exist any more. `since`: an RFC 3339
        time."""
        query = {"container": container}
        if tail is not None:
            query["tailLines"] = str(tail)
        if since is not None:
            query["sinceTime"] = since
        for name, is_set in (("previous", previous), ("follow", follow), ("timestamps", timestamps)):
            if is_set:
                query[name] = "true"
        request = Request("get", "v1", "Pod", namespace, pod, "log")
        timeout_sec = ANSWER_SEC
        if follow:
            timeout_sec = FOLLOW_SEC
        elif tail is not None:
            timeout_sec = TAIL_SEC
        try:
            response = self._send(request, query, None, timeout_sec)
        except UsageError as refused:
            if refused.details.get("status") == "HTTP 400":  # it has not started, or there is no previous container
                return
            raise
        if response is None:
            return
        with closing(response):
            yield from _lines(response, request, self.name)

    def run(self, pod: str, namespace: str, container: str, command: list[str]) -> Iterator[bytes]:
        """Standard output of a command in a pod, streamed. Raises an error if the command fails."""
        errors = b""
        with closing(self.start(pod, namespace, container, command)) as process:
            for channel, data in process.output():
                if channel == STDOUT:
                    yield data
                else:
                    errors = (errors + data)[-MESSAGE_BYTES:]
        process.check(errors)

    def start(self, pod: str, namespace: str, container: str, command: list[str], stdin: bool = False) -> PodProcess:
        """Start a command in a pod."""
        from kubernetes.stream.ws_client import create_websocket

        found = self.get("v1", "Pod", pod, namespace)
        if found is None or found.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            raise ClusterError(f"Pod {pod} does not exist in namespace {namespace} any more.")
        request = Request("create", "v1", "Pod", namespace, pod, "exec")
        query = [("container", container), ("stdout", "true"), ("stderr", "true")]
        if stdin:
            query.append(("stdin", "true"))
        query += [("command", word) for word in command]
        host = "ws" + self._settings.host.removeprefix("http")
        try:
            headers = {row["key"].lower(): row["value"] for row in self._settings.auth_settings().values()}
            address = f"{host}{_path(request)}?{urlencode(query)}"
            socket = connect_within(EXEC_SEC, lambda: create_websocket(self._settings, address, headers))
            socket.settimeout(ANSWER_SEC)
        except Exception as problem:
            status = getattr(problem, "status_code", None)
            if isinstance(status, int) and status >= 400:
                body = getattr(problem, "resp_body", None) or b""
                gone = ClusterError(f"Pod {pod} does not exist in namespace {namespace} any more.")
                raise refusal_error(request, status, body.decode("utf-8", "replace"), self.options) or gone from None
            raise self._unreachable(problem) from None
        return PodProcess(socket, pod, self._unreachable)

    def usage(self, namespace: str, labels: Labels) -> dict[str, dict[str, dict[str, str]]] | None:
        """Current usage: pod -> container -> {"cpu": ..., "memory": ...}, as quantities. None if the metrics API is not
        installed or not allowed."""
        try:
            rows = self.find("metrics.k8s.io/v1beta1", "PodMetrics", namespace, labels)
        except LlmtrainError:
            return None
        usage: dict[str, dict[str, dict[str, str]]] = {}
        for row in rows:
            containers = usage[row["metadata"]["name"]] = {}
            for container in row.get("containers", []):
                containers[container["name"]] = container.get("usage", {})
        return usage

    def _json(self, request: Request, query: dict[str, str] | None = None, body: Object | None = None) -> Object | None:
        response = self._send(request, query or {}, body, ANSWER_SEC)
        if response is None:
            return None
        try:
            found = json.loads(response.read())
        except ValueError:
            raise self._not_an_api_server() from None
        except Exception as problem:  # the connection was lost
            raise self._unreachable(problem) from None
        if not _is_api_object(request, found):
            raise self._not_an_api_server()
        return found  # type: ignore[no-any-return]

    def _send(self, request: Request, query: dict[str, str], body: Object | None, timeout_sec: float) -> Any:
        """The response, not read yet; None if the object does not exist."""
        import urllib3

        method = _METHODS[request.verb]
        url = f"{self._settings.host}{_path(request)}"
        parameters = urlencode({key: value for key, value in query.items() if value})
        if parameters:
            url += f"?{parameters}"
        headers = {
            "Accept": "application/json, */*",
            "Content-Type": "application/json",
            "User-Agent": "llmtrain",
        }
        if method == "PATCH":
            headers["Content-Type"] = "application/merge-patch+json"
        retries = 1 if method == "GET" else 0  # a change may have been made although the answer was lost
        try:
            for setting in self._settings.auth_settings().values():
                headers[setting["key"]] = setting["value"]
            response = self._pool.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_SEC, read=timeout_sec),
                retries=urllib3.Retry(retries, redirect=0, status=0, raise_on_status=False),
                preload_content=False,
            )
            note_date(response.headers.get("Date"))
            if response.status < 400:
                return response
            text = response.read().decode("utf-8", "replace")
        except Exception as problem:  # urllib3 raises many types, credential plugins any
            raise self._unreachable(problem) from None
        refused = refusal_error(request, response.status, text, self.options)
        if refused is None:
            return None
        raise refused

    def _not_an_api_server(self) -> ClusterError:
        return ClusterError(
            f"{self._settings.host} (context {self.name}) is not a Kubernetes API server.",
            remedy="Check the server URL in the kubeconfig and whether a proxy answers instead, or select another "
            "--context.",
        )

    def _unreachable(self, problem: Exception) -> ClusterError:
        reason = getattr(problem, "reason", None) or problem
        return ClusterError(
            f"Unable to connect to the cluster of context {self.name} ({self._settings.host}): {redacted_line(reason)}",
            remedy=f"Check `kubectl get nodes{self.options}`, or select another --context.",
        )


def _selector(values: Mapping[str, str | None]) -> str:
    terms = []
    for key, value in values.items():
        terms.append(key if value is None else f"{key}={value}")
    return ",".join(terms)


def _is_api_object(request: Request, found: object) -> bool:
    """Whether a response is an object or a list of objects, as an API server sends them: a proxy may answer instead."""
    if not isinstance(found, dict):
        return False
    if request.verb == "delete":  # the response may be a Status
        return bool(found)
    if request.kind == "SelfSubjectAccessReview":
        return isinstance(found.get("status"), dict)
    if request.verb != "list":
        return _has_metadata(found)
    items = found.get("items", ())
    if items is None:  # Go's empty list
        return True
    return isinstance(items, list) and all(map(_has_metadata, items))


def _has_metadata(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("metadata"), dict)


def plural_of(kind: str) -> str:
    """The resource of a kind, as the API server spells it in URLs: by the rule of Kubernetes' own tools."""
    name = kind.lower()
    if kind == "PodMetrics":
        return "pods"
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}s"


def _path(request: Request) -> str:
    path = f"/apis/{request.api_version}"
    if request.api_version == "v1":
        path = "/api/v1"
    if request.namespace is not None:
        path += f"/namespaces/{quote(request.namespace)}"
    path += f"/{plural_of(request.kind)}"
    if request.name and (request.subresource or request.verb != "create"):
        path += f"/{quote(request.name)}"
    if request.subresource:
        path += f"/{request.subresource}"
    return path


def _lines(response: Any, request: Request, cluster: str) -> Iterator[str]:
    rest = b""
    try:
        for chunk in response.stream(amt=2**14):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
    except GeneratorExit:
        raise
    except Exception as problem:
        raise ClusterError(f"Reading the log of {request.name} failed ({cluster}): {redacted_line(problem)}") from None
    if rest:
        yield rest.decode("utf-8", "replace")
