"""Cluster: kubeconfigs, API servers that are broken or unreachable, and the requests it sends."""

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube_server import KubeServer, kube_server
from limits import limit
from llmtrain.errors import ClusterError, LlmtrainError, UsageError
from llmtrain.kubernetes import client as module
from llmtrain.kubernetes.api_errors import KindNotFound
from llmtrain.kubernetes.client import Cluster
from llmtrain.kubernetes.kubeconfig import default_context

TOKEN = "canary-bearer-5f3a91c07e"


@pytest.fixture
def kube() -> Iterator[KubeServer]:
    with kube_server() as server:
        yield server


ELSEWHERE = {"name": "here", "context": {"cluster": "local", "user": "me", "namespace": "elsewhere"}}


def kubeconfig(directory: Path, port: int, **more: Any) -> str:
    """Two contexts, `here` (in namespace team) and `plain`; `more` replaces top-level keys."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "local", "user": "me", "namespace": "team"}},
            {"name": "plain", "context": {"cluster": "local", "user": "me"}},
        ],
        "current-context": "here",
        **more,
    }
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump({name: value for name, value in document.items() if value is not None}))
    return str(path)


class TestConnect:
    def test_uses_the_current_context_and_its_namespace(self, kube: KubeServer, tmp_path: Path) -> None:
        path = kubeconfig(tmp_path, kube.port)
        found = Cluster.connect(path)
        assert (found.name, found.namespace) == ("here", "team")
        assert kube.requests == []
        other = Cluster.connect(path, "plain")
        assert (other.name, other.namespace) == ("plain", "default")

    def test_uses_the_default_kubeconfig(
        self, kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KUBECONFIG", f"/nowhere/at-all:{kubeconfig(tmp_path, kube.port)}")
        assert Cluster.connect().namespace == "team"
        (tmp_path / ".kube").mkdir()
        (tmp_path / "kubeconfig").rename(tmp_path / ".kube" / "config")
        monkeypatch.delenv("KUBECONFIG")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert Cluster.connect().namespace == "team"

    def test_first_of_several_files_wins(
        self, kube: KubeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As in kubectl, for contexts of the same name and for the current context."""
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        one = kubeconfig(tmp_path / "one", kube.port)
        two = kubeconfig(tmp_path / "two", kube.port, contexts=[ELSEWHERE])
        monkeypatch.setenv("KUBECONFIG", f"{one}:{two}")
        assert Cluster.connect().namespace == "team"
        assert default_context() == ("here", "team")
        monkeypatch.setenv("KUBECONFIG", f"{two}:{one}")
        assert default_context() == ("here", "elsewhere")

    def test_default_context_needs_no_kubeconfig(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert default_context() == (None, "default")
        empty = tmp_path / "empty"
        empty.write_text("apiVersion: v1\nkind: Config\n")
        assert default_context(str(empty)) == (None, "default")
        for options in ((str(tmp_path / "missing"), None), (None, "there"), (str(empty), "there")):
            with pytest.raises(UsageError):
                default_context(*options)
        monkeypatch.setattr("llmtrain.kubernetes.kubeconfig._SERVICE_ACCOUNT", tmp_path)
        (tmp_path / "token").write_text("x")
        (tmp_path / "namespace").write_text("pods-own\n")
        assert default_context() == (None, "pods-own")

    @pytest.mark.parametrize("context", [None, "here"])
    def test_missing_file_is_refused(self, tmp_path: Path, context: str | None) -> None:
        with pytest.raises(UsageError, match="missing") as caught:
            Cluster.connect(str(tmp_path / "missing"), context)
        assert "--kubeconfig" in str(caught.value.remedy)

    @pytest.mark.parametrize(
        "text",
        ["", "a: [", "just words", "- 1\n- 2", "contexts: 3", "\x00", "apiVersion: v1\nkind: Config\n", "\xff\xfe"],
        ids=["empty", "broken", "words", "list", "number", "nul", "bare", "bytes"],
    )
    def test_invalid_file_is_refused(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "kubeconfig"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(UsageError) as caught:
            Cluster.connect(str(path))
        assert "\n" not in caught.value.what

    def test_directory_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError):
            Cluster.connect(str(tmp_path))

    def test_unknown_context_error_lists_the_contexts(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="'there'") as caught:
            Cluster.connect(kubeconfig(tmp_path, 1), "there")
        assert caught.value.known == ["here", "plain"]

    @pytest.mark.parametrize("current", [None, "", "gone"])
    def test_named_context_works_without_a_current_one(
        self, kube: KubeServer, tmp_path: Path, current: str | None
    ) -> None:
        path = kubeconfig(tmp_path, kube.port, **{"current-context": current})
        assert Cluster.connect(path, "plain").name == "plain"

    def test_incomplete_context_is_refused(self, tmp_path: Path) -> None:
        secure = {"clusters": [{"name": "local", "cluster": {"server": "https://127.0.0.1:1"}}]}
        for more in (
            {"clusters": []},
            {**secure, "users": [{"name": "me", "user": {"client-certificate": "/no/cert", "client-key": "/no/key"}}]},
            {"clusters": [{"name": "local", "cluster": {"server": "https://h", "certificate-authority": "/no/ca"}}]},
        ):
            with pytest.raises(UsageError, match=r"context here|name local in"):
                Cluster.connect(kubeconfig(tmp_path, 1, **more))

    def test_failing_credential_plugin_is_an_error(self, tmp_path: Path) -> None:
        program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-program", "args": ["token"]}
        users = [{"name": "me", "user": {"exec": {**program, "interactiveMode": "Never"}}}]
        with pytest.raises(LlmtrainError):
            Cluster.connect(kubeconfig(tmp_path, 1, users=users)).get("v1", "Pod", "x", "team")


@contextmanager
def raw_server(answer: bytes | None) -> Iterator[int]:
    """Sends `answer` to every client and closes the connection. None: never answers."""
    silence = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(2**16)
            if answer is None:
                silence.wait(30)
            else:
                self.request.sendall(answer)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, *words: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        silence.set()
        server.shutdown()
        server.server_close()


def http(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers])
    return head.encode() + b"\r\n\r\n" + body


REQUESTS: dict[str, Callable[[Cluster], object]] = {
    "get": lambda c: c.get("v1", "ConfigMap", "x", "team"),
    "find": lambda c: c.find("v1", "Pod", "team"),
    "create": lambda c: c.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "namespace": "team"}}
    ),
    "patch": lambda c: c.patch("v1", "ConfigMap", "x", "team", {"data": {}}),
    "delete": lambda c: c.delete("v1", "ConfigMap", "x", "team"),
    "log": lambda c: list(c.log("x", "team", "trainer")),
}


class TestBrokenServers:
    @pytest.mark.parametrize("request_name", REQUESTS)
    def test_closed_port_is_a_cluster_error(self, tmp_path: Path, request_name: str) -> None:
        with socket.socket() as bound:  # bound, but not listening
            bound.bind(("127.0.0.1", 0))
            cluster = Cluster.connect(kubeconfig(tmp_path, bound.getsockname()[1]))
            started = time.monotonic()
            with pytest.raises(ClusterError, match=r"context here .http") as caught:
                REQUESTS[request_name](cluster)
        assert time.monotonic() - started < limit(5)
        assert caught.value.exit_code == 69
        assert caught.value.remedy
        assert TOKEN not in str(caught.value)

    def test_silent_server_times_out(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "ANSWER_SEC", 0.3)
        with raw_server(None) as port:
            started = time.monotonic()
            with pytest.raises(ClusterError, match="context here"):
                Cluster.connect(kubeconfig(tmp_path, port)).get("v1", "Pod", "x", "team")
        assert time.monotonic() - started < limit(5)
        assert module.CONNECT_SEC <= 10, "a host that is down is detected within seconds"

    @pytest.mark.parametrize(
        "answer",
        [
            b"",
            b"SSH-2.0-OpenSSH_9.2\r\n",
            http(b"<html>Sign in</html>"),
            http(b""),
            http(b'{"kind": "Pod"', length=4000),
            http(b'{"kind":'),
            http(b"\xff\xfe"),
            http(b"", "302 Found", "Location: https://login.example.com/"),
        ],
        ids=["closes", "ssh", "captive portal", "empty", "truncated", "half JSON", "bytes", "login page"],
    )
    @pytest.mark.parametrize("request_name", ["get", "find", "create"])
    def test_invalid_response_is_a_cluster_error(self, tmp_path: Path, answer: bytes, request_name: str) -> None:
        with raw_server(answer) as port, pytest.raises(ClusterError, match="context here") as caught:
            REQUESTS[request_name](Cluster.connect(kubeconfig(tmp_path, port)))
        assert "\n" not in caught.value.what

    @pytest.mark.parametrize("body", [b"[1]", b'"ok"', b"3", b"null"])
    def test_json_that_is_not_an_object_is_a_cluster_error(self, tmp_path: Path, body: bytes) -> None:
        with raw_server(http(body)) as port:
            cluster = Cluster.connect(kubeconfig(tmp_path, port))
            for request_name in ("get", "find"):
                with pytest.raises(ClusterError):
                    REQUESTS[request_name](cluster)

    def test_interrupted_log_is_a_cluster_error(self, tmp_path: Path) -> None:
        with raw_server(chunked(b"first\nsecond\nthi")[: -len(b"0\r\n\r\n")]) as port:
            lines = Cluster.connect(kubeconfig(tmp_path, port)).log("x", "team", "trainer")
            assert [next(lines), next(lines)] == ["first", "second"]
            with pytest.raises(ClusterError, match="log of x"):
                next(lines)


class TestToken:
    def test_is_sent_with_every_request(self, kube: KubeServer, tmp_path: Path) -> None:
        tokens = []

        def gate(method: str, path: str, headers: Mapping[str, str]) -> None:  # noqa: ARG001
            tokens.append(headers["Authorization"])

        kube.gate = gate
        cluster = Cluster.connect(kubeconfig(tmp_path, kube.port))
        kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {}, "status": {}})
        kube.say("x", "hello")
        for send in REQUESTS.values():
            send(cluster)
        assert tokens == [f"Bearer {TOKEN}"] * len(REQUESTS)

    @pytest.mark.parametrize("code", [401, 403, 500])
    def test_is_not_in_errors(self, kube: KubeServer, tmp_path: Path, code: int) -> None:
        kube.gate = lambda *_: (code, json.dumps({"message": "no"}))
        with pytest.raises(LlmtrainError) as caught:
            Cluster.connect(kubeconfig(tmp_path, kube.port)).get("v1", "Pod", "x", "team")
        assert TOKEN not in json.dumps(caught.value.as_dict())

    @pytest.mark.parametrize("code", [401, 403, 500])
    def test_is_redacted_if_a_proxy_repeats_it(self, kube: KubeServer, tmp_path: Path, code: int) -> None:
        kube.gate = lambda method, path, headers: (code, f"refused: {headers['Authorization']} {method} {path}")
        with pytest.raises(LlmtrainError) as caught:
            Cluster.connect(kubeconfig(tmp_path, kube.port)).get("v1", "Pod", "x", "team")
        assert TOKEN not in json.dumps(caught.value.as_dict())


def manifest(kind: str, name: str, namespace: str = "team", **labels: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": kind, "metadata": meta}


class TestObjects:
    def test_find_selects_by_label_field_and_namespace(self, kube: KubeServer) -> None:
        kube.add(manifest("Pod", "a", app="llmtrain", run="one"))
        kube.add(manifest("Pod", "b", app="llmtrain", run="two"))
        kube.add(manifest("Pod", "c", app="llmtrain"))
        kube.add(manifest("Pod", "d", "other", app="llmtrain", run="one"))
        kube.add(manifest("Pod", "e", app="shop", run="one"))
        cluster = kube.cluster()

        def names(namespace: str | None, labels: dict[str, str | None] | None, **more: Any) -> list[str]:
            return [row["metadata"]["name"] for row in cluster.find("v1", "Pod", namespace, labels, **more)]

        assert names("team", {"app": "llmtrain", "run": "one"}) == ["a"]
        assert names("team", {"app": "llmtrain", "run": None}) == ["a", "b"]
        assert names(None, {"app": "llmtrain", "run": "one"}) == ["a", "d"]
        assert names("team", None) == ["a", "b", "c", "e"]
        assert names("team", None, fields={"metadata.name": "c"}) == ["c"]
        assert names("nowhere", None) == []

    def test_find_adds_kind_and_api_version(self, kube: KubeServer) -> None:
        for kind, api_version in (("Job", "batch/v1"), ("PyTorchJob", "kubeflow.org/v1")):
            stored = kube.add(manifest(kind, "x"))
            del stored["kind"], stored["apiVersion"]  # as in the list of a real server
            (found,) = kube.cluster().find(api_version, kind, "team")
            assert (found["kind"], found["apiVersion"], found["metadata"]["name"]) == (kind, api_version, "x")

    def test_missing_crd_is_kind_not_found(self, kube: KubeServer) -> None:
        kube.missing_kinds = {"jobsets"}
        cluster = kube.cluster()
        for send in (
            lambda: cluster.get("jobset.x-k8s.io/v1alpha2", "JobSet", "x", "team"),
            lambda: cluster.find("jobset.x-k8s.io/v1alpha2", "JobSet", None),
        ):
            with pytest.raises(KindNotFound, match="JobSet"):
                send()

    def test_create_patch_and_delete(self, kube: KubeServer) -> None:
        cluster = kube.cluster()
        place = ("v1", "ConfigMap", "x", "team")
        assert cluster.get(*place) is None
        assert cluster.patch(*place, {"data": {"a": "1"}}) is None
        assert cluster.delete(*place) is False
        assert cluster.create({**manifest("ConfigMap", "x"), "data": {"a": "1", "b": "2"}})["metadata"]["uid"]
        changed = cluster.patch(*place, {"data": {"a": None, "c": "3"}})
        assert changed is not None
        assert changed["data"] == {"b": "2", "c": "3"}
        assert cluster.delete(*place) is True
        assert cluster.get(*place) is None

    def test_request_paths_and_headers(self, kube: KubeServer) -> None:
        sent: list[tuple[str, str, str | None]] = []

        def gate(method: str, path: str, headers: Mapping[str, str]) -> None:
            sent.append((method, path, headers.get("Content-Type")))

        kube.gate = gate
        cluster = kube.cluster()
        cluster.create(manifest("ConfigMap", "x"))
        cluster.create(manifest("ConfigMap", "y"), dry_run=True)
        cluster.patch("v1", "ConfigMap", "x", "team", {})
        cluster.get("batch/v1", "Job", "x", "team")
        created, dry_run, patched, got = sent
        assert created[1] == "/api/v1/namespaces/team/configmaps?fieldManager=llmtrain&fieldValidation=Strict"
        assert dry_run[1].endswith("&dryRun=All")
        assert patched[2] == "application/merge-patch+json"
        assert got[:2] == ("GET", "/apis/batch/v1/namespaces/team/jobs/x")
        assert set(kube.objects) == {("configmaps", "team", "x")}

    def test_names_are_quoted_in_paths(self, kube: KubeServer) -> None:
        paths = []
        kube.gate = lambda method, path, headers: paths.append(path)  # noqa: ARG005
        kube.cluster().get("v1", "ConfigMap", "x?y#z", "te am")
        assert paths == ["/api/v1/namespaces/te%20am/configmaps/x%3Fy%23z"]

    def test_usage_is_none_without_metrics(self, kube: KubeServer) -> None:
        cluster = kube.cluster()
        assert cluster.usage("team", {"app": "llmtrain"}) is None
        kube.metrics = {"demo-0": {"cpu": "12m", "memory": "3Mi"}}
        assert cluster.usage("team", {}) == {"demo-0": {"trainer": {"cpu": "12m", "memory": "3Mi"}}}
        kube.forbidden = {"pods"}
        assert cluster.usage("team", {}) is None
        kube.is_away = True
        assert cluster.usage("team", {}) is None


def chunked(*chunks: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in (*chunks, b""))


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([], []),
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"one\ntwo"], ["one", "two"]),
        ([b"on", b"e\nt", b"wo\n"], ["one", "two"]),
        ([b"one", b"\n", b"\n", b"two\n"], ["one", "", "two"]),
        ([bytes([byte]) for byte in "größe 学 🙂\nnext".encode()], ["größe 学 🙂", "next"]),
        ([b"bad \xff byte\ngood\n"], ["bad \N{REPLACEMENT CHARACTER} byte", "good"]),
        (["cut \xe9".encode()[:-1]], ["cut \N{REPLACEMENT CHARACTER}"]),
        ([b"a\rb\x0bc\x85d\n", "e\u2028f\n".encode()], ["a\rb\x0bc\N{REPLACEMENT CHARACTER}d", "e\u2028f"]),
        ([b"x" * 20_000 + b"\n", b"y" * 40_000], ["x" * 20_000, "y" * 40_000]),
    ],
    ids=[
        "none",
        "whole",
        "no newline",
        "chunks",
        "empty",
        "characters",
        "not UTF-8",
        "half a character",
        "breaks",
        "long",
    ],
)
def test_log_is_split_into_lines(tmp_path: Path, chunks: list[bytes], lines: list[str]) -> None:
    with raw_server(chunked(*chunks)) as port:
        assert list(Cluster.connect(kubeconfig(tmp_path, port)).log("x", "team", "trainer")) == lines


def test_missing_log_is_empty_and_forbidden_log_an_error(kube: KubeServer) -> None:
    cluster = kube.cluster()
    assert list(cluster.log("gone", "team", "trainer")) == []
    kube.add({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {}, "status": {}})
    assert list(cluster.log("x", "team", "trainer")) == [], "it has not started"
    kube.say("x", "a", "b", "c")
    assert list(cluster.log("x", "team", "trainer", tail=2)) == ["b", "c"]
    assert list(cluster.log("x", "team", "trainer", tail=0)) == []
    assert list(cluster.log("x", "team", "trainer", previous=True)) == []
    kube.forbidden = {"log"}
    with pytest.raises(UsageError, match="get pods/log"):
        list(cluster.log("x", "team", "trainer"))
