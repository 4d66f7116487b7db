"""A fake API server on 127.0.0.1.

It keeps objects in memory and implements what llmtrain uses: get, list (label and field selectors), create, merge
patch, delete, and logs with all their options. The real client talks to it over HTTP. It runs no pods: tests change
their status. It can also be made unreachable.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import yaml

from llmtrain.kubernetes.client import Cluster, plural_of

Object = dict[str, Any]
KINDS = {
    plural_of(kind): kind
    for kind in (
        *("ConfigMap", "Deployment", "Event", "Job", "JobSet", "LocalQueue", "NetworkPolicy", "PersistentVolume"),
        *("PersistentVolumeClaim", "Pod", "PodDisruptionBudget", "PodMonitor", "PyTorchJob", "Role", "RoleBinding"),
        *("Secret", "SelfSubjectAccessReview", "Service", "ServiceAccount", "StatefulSet", "TrainJob"),
        *("TrainingRuntime", "Workload"),
    )
}
CLUSTER_WIDE = {"PersistentVolume"}
Key = tuple[str, str, str]
"""Plural, namespace (empty if cluster-scoped), name."""


def merge(old: Object, change: Object) -> Object:
    """JSON merge patch (RFC 7386): null removes."""
    new = dict(old)
    for key, value in change.items():
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict):
            new[key] = merge(new[key] if isinstance(new.get(key), dict) else {}, value)
        else:
            new[key] = value
    return new


@dataclass
class Log:
    """The log of one container; after a restart only the previous one is kept."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    previous: list[tuple[str, str]] | None = None
    is_ended: bool = False


@dataclass
class KubeServer:
    port: int = 0
    objects: dict[Key, Object] = field(default_factory=dict)
    logs: dict[tuple[str, str, str], Log] = field(default_factory=dict)
    """By namespace, pod and container."""
    missing_kinds: set[str] = field(default_factory=set)
    """Plurals of kinds whose operator is not installed."""
    metrics: dict[str, dict[str, str]] | None = None
    """Pod -> usage of its container; None without metrics-server."""
    forbidden: set[str] = field(default_factory=set)
    """Plurals that may not be read, or `log`."""
    is_away: bool = False
    ahead_sec: float = 0.0
    """How far its clock is ahead of the local clock."""
    gate: Callable[[str, str, Mapping[str, str]], tuple[int, str] | None] | None = None
    """Called first with method, path and headers; may return status and body. Status 0 drops the connection."""
    requests: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)
    _clock: int = field(default_factory=time.time_ns)
    _uids: int = 0
    _versions: int = 0

    def kubeconfig(self, directory: Path) -> Path:
        """A kubeconfig for this server: one context with namespace team, another with lab."""
        names = {"cluster": "local", "user": "me"}
        spaces = {"here": "team", "there": "lab"}
        document = {
            "clusters": [{"name": "local", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": name, "context": {**names, "namespace": space}} for name, space in spaces.items()],
            "current-context": "here",
        }
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    def cluster(self, namespace: str = "team") -> Cluster:
        from kubernetes import client

        settings = client.Configuration()
        settings.host = f"http://127.0.0.1:{self.port}"
        return Cluster(settings, "test", namespace)

    def add(self, manifest: Object) -> Object:
        """Create an object with creation time and uid, like a real server."""
        with self.lock:
            meta = manifest["metadata"]
            home = "" if manifest["kind"] in CLUSTER_WIDE else "team"
            key = (plural_of(manifest["kind"]), meta.get("namespace", home), meta["name"])
            self._uids += 1
            stamps = {"uid": f"uid-{self._uids}", "creationTimestamp": now(), "namespace": key[1]}
            self.objects[key] = {**manifest, "metadata": {**stamps, **meta, "resourceVersion": self.version()}}
            return self.objects[key]

    def version(self) -> str:
        """The next resourceVersion."""
        self._versions += 1
        return str(self._versions)

    def merge(self, key: Key, change: Object) -> Object:
        with self.lock:
            changed = merge(self.objects[key], change)
            if changed != self.objects[key]:  # an empty change creates no new version
                self.objects[key] = merge(changed, {"metadata": {"resourceVersion": self.version()}})
            return self.objects[key]

    def change(self, kind: str, name: str, change: Object, namespace: str = "team") -> None:
        with self.lock:
            self.merge((plural_of(kind), namespace, name), change)

    def remove(self, kind: str, name: str, namespace: str = "team") -> None:
        with self.lock:
            del self.objects[plural_of(kind), namespace, name]
            for key in [key for key in self.logs if kind == "Pod" and key[:2] == (namespace, name)]:
                self.logs.pop(key).is_ended = True

    def say(self, pod: str, *lines: str, container: str = "trainer", namespace: str = "team") -> None:
        """Append log lines of a container with increasing times."""
        with self.lock:
            log = self.logs.setdefault((namespace, pod, container), Log())
            for line in lines:
                log.lines.append((self.tick(), line))

    def tick(self) -> str:
        """The next log timestamp, with nanoseconds and without trailing zeros."""
        self._clock += 100_000_010
        seconds, rest = divmod(self._clock, 1_000_000_000)
        fraction = f"{rest:09}".rstrip("0")
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{fraction}Z"

    def end_log(self, pod: str, container: str = "trainer", namespace: str = "team") -> None:
        with self.lock:
            self.logs.setdefault((namespace, pod, container), Log()).is_ended = True

    def restart_log(self, pod: str, container: str = "trainer", namespace: str = "team") -> None:
        """Restart the container: followers of the old log reach its end."""
        with self.lock:
            old = self.logs[namespace, pod, container]
            old.is_ended = True
            self.logs[namespace, pod, container] = Log(previous=old.lines)

    def asked(self) -> Counter[str]:
        return Counter(self.requests)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class _Handler(BaseHTTPRequestHandler):
    kube: KubeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise delayed ACKs slow every response by 40 ms

    def log_message(self, *words: object) -> None:
        pass

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) + self.kube.ahead_sec)

    def handle_one_request(self) -> None:
        if self.kube.is_away:
            self.close_connection = True
            return
        super().handle_one_request()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        verdict = self.kube.gate and self.kube.gate(self.command, self.path, self.headers)
        if not verdict:
            return True
        self._body()
        if verdict[0]:
            self._send(verdict[0], verdict[1].encode(), "application/json")
        else:
            self.close_connection = True
        return False

    def do_GET(self) -> None:
        place, query = self._read()
        if place is None:
            self._refuse(404, "404 page not found", is_text=True)
        elif place.part == "log":
            self._log(place, query)
        elif place.name:
            with self.kube.lock:
                found = self.kube.objects.get((place.plural, place.namespace or "", place.name))
            if found is None:
                self._refuse(404, f'{place.plural} "{place.name}" not found')
            else:
                self._answer(200, found)
        else:
            self._list(place, query)

    def do_POST(self) -> None:
        place, query = self._read()
        manifest = self._body()
        assert place is not None
        if place.plural == "selfsubjectaccessreviews":  # everything is allowed
            self._answer(201, {**manifest, "status": {"allowed": True}})
            return
        key = (place.plural, place.namespace or "", manifest["metadata"]["name"])
        if key in self.kube.objects:
            self._refuse(409, f'{place.plural} "{key[2]}" already exists')
        else:
            if place.plural == "pods":
                manifest = {"status": {"phase": "Pending"}, **manifest}
            self._answer(201, manifest if query.get("dryRun") else self.kube.add(manifest))

    def do_PATCH(self) -> None:
        place, _ = self._read()
        change = self._body()
        assert place is not None
        key = (place.plural, place.namespace or "", place.name)
        if key not in self.kube.objects:
            self._refuse(404, f'{place.plural} "{place.name}" not found')
            return
        if self._is_another(key, (change.get("metadata") or {}).get("uid")):
            return
        with self.kube.lock:
            version = (change.get("metadata") or {}).get("resourceVersion")
            is_current = version in (None, self.kube.objects[key]["metadata"]["resourceVersion"])
            changed = self.kube.merge(key, change) if is_current else None
        if changed is None:
            self._refuse(409, "the object has been modified; please apply your changes to the latest version")
        else:
            self._answer(200, changed)

    def do_DELETE(self) -> None:
        place, _ = self._read()
        options = self._body()
        assert place is not None
        key = (place.plural, place.namespace or "", place.name)
        wanted = options.get("preconditions") or {}
        if self._is_another(key, wanted.get("uid")):
            return
        with self.kube.lock:
            found = self.kube.objects.get(key)
            version = wanted.get("resourceVersion")
            is_other = found is not None and version not in (None, found["metadata"]["resourceVersion"])
            if not is_other:
                self.kube.objects.pop(key, None)
        if is_other:
            self._refuse(409, f"Precondition failed: ResourceVersion in precondition: {version}")
        elif found is None:
            self._refuse(404, f'{place.plural} "{place.name}" not found')
        else:
            self._answer(200, found)

    def _is_another(self, key: Key, uid: str | None) -> bool:
        """Whether the uid in the request is not that of the current object."""
        there = self.kube.objects.get(key)
        if there is None or uid in (None, there["metadata"].get("uid")):
            return False
        self._refuse(409, f"Precondition failed: UID in precondition: {uid}")
        return True

    def _read(self) -> "tuple[_Place | None, dict[str, str]]":
        url = urlsplit(self.path)
        query = dict(parse_qsl(url.query))
        place = _Place.of(unquote(url.path))
        is_known = place is not None and place.plural in KINDS and place.plural not in self.kube.missing_kinds
        if place is not None and place.is_metrics:
            is_known = self.kube.metrics is not None
        self.kube.requests.append(f"{self.command} {place.what if place else self.path}")
        return (place if is_known else None), query

    def _body(self) -> Object:
        value: Object = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        return value

    def _list(self, place: "_Place", query: dict[str, str]) -> None:
        if place.plural in self.kube.forbidden:
            self._refuse(403, f'{place.plural} is forbidden: User "me" cannot list resource "{place.plural}"')
            return
        with self.kube.lock:
            if place.is_metrics:
                rows = [
                    {"metadata": {"name": pod}, "containers": [{"name": "trainer", "usage": usage}]}
                    for pod, usage in (self.kube.metrics or {}).items()
                ]
                self._answer(200, {"items": rows})
                return
            found = [
                value
                for (plural, namespace, _), value in self.kube.objects.items()
                if plural == place.plural
                and place.namespace in (None, namespace)
                and _fits(value["metadata"].get("labels") or {}, query.get("labelSelector", ""))
                and _fits(_flat(value), query.get("fieldSelector", ""))
            ]
        self._answer(200, {"items": found})

    def _log(self, place: "_Place", query: dict[str, str]) -> None:
        key = (place.namespace or "", place.name, query["container"])
        with self.kube.lock:
            log = self.kube.logs.get(key)
            is_there = (place.plural, key[0], key[1]) in self.kube.objects
        if "log" in self.kube.forbidden:
            self._refuse(403, 'pods "x" is forbidden: User "me" cannot get resource "pods/log"')
        elif not is_there:
            self._refuse(404, f'pods "{place.name}" not found')
        elif log is None or ("previous" in query and log.previous is None):
            self._refuse(400, f'container "{key[2]}" in pod "{place.name}" is waiting to start')
        else:
            self._send_log(log, query)

    def _send_log(self, log: Log, query: dict[str, str]) -> None:
        rows = (log.previous or []) if "previous" in query else log.lines
        start = 0
        if "tailLines" in query:
            start = max(0, len(rows) - int(query["tailLines"]))
        since = query.get("sinceTime", "")[:19]  # whole seconds, like a real server
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while not self.kube.is_away:
            with self.kube.lock:
                ready, is_ended = rows[start:], log.is_ended
            start += len(ready)
            for stamp, line in ready:
                if stamp[:19] >= since:
                    text = f"{stamp} {line}\n" if "timestamps" in query else f"{line}\n"
                    self._chunk(text.encode())
            if "follow" not in query or is_ended:
                self._chunk(b"")
                return
            time.sleep(0.01)
        self.close_connection = True  # in the middle of the response

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, value: Object) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _refuse(self, status: int, message: str, is_text: bool = False) -> None:
        body = message if is_text else json.dumps({"kind": "Status", "code": status, "message": message})
        self._send(status, body.encode(), "text/plain" if is_text else "application/json")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@dataclass(frozen=True)
class _Place:
    """A parsed path: /apis/GROUP/VERSION/namespaces/NS/PLURAL/NAME/PART."""

    plural: str
    namespace: str | None
    name: str
    part: str
    is_metrics: bool

    @property
    def what(self) -> str:
        return "metrics" if self.is_metrics else self.part or f"{self.plural}{'/' + self.name if self.name else ''}"

    @classmethod
    def of(cls, path: str) -> "_Place | None":
        words = path.strip("/").split("/")
        group, rest = (words[1], words[3:]) if words[0] == "apis" else ("", words[2:])
        namespace = None
        if rest and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        if not rest:
            return None
        plural, name, part = [*rest, "", ""][:3]
        return cls(plural, namespace, name, part, group == "metrics.k8s.io")


def _fits(values: dict[str, Any], selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        key, equals, wanted = term.partition("=")
        if key not in values or (equals and values[key] != wanted):
            return False
    return True


def _flat(value: Object, before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{before}{key}.") if isinstance(item, dict) else {f"{before}{key}": item}
    return flat


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *words: object) -> None:
        """Ignore clients that disconnect."""


@contextmanager
def kube_server() -> Iterator[KubeServer]:
    kube = KubeServer()
    handler = type("Handler", (_Handler,), {"kube": kube})
    server = _Server(("127.0.0.1", 0), handler)
    kube.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield kube
    finally:
        kube.is_away = True  # ends followed logs
        server.shutdown()
        server.server_close()
