"""A fake Hugging Face hub on 127.0.0.1: the endpoints that huggingface_hub uses to inspect and download a repository,
and to upload one (with LFS; the real hub prefers Xet). It records every request and fails on demand."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from limits import limit

API = re.compile(
    r"/api/(?P<kind>model|dataset)s/(?P<name>[^/]+/[^/]+)"
    r"(?:/(?P<verb>revision|tree)/(?P<revision>[^/]+)(?P<directory>/.+)?)?"
)
RESOLVE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")

UPLOAD = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/(?P<verb>preupload|commit)/main")
LFS_BATCH = re.compile(r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
LFS_OBJECT = "/lfs-object/"

OLD_NAME = re.compile(r"(?:/api)?/(?:models|datasets)/(?P<name>[^/]+)(?=$|/(?:revision|tree|resolve)/)")


@dataclass
class Repo:
    files: dict[str, bytes]
    kind: str = "model"
    token: str | None = None
    """Token that may read it; None makes it public."""
    gated: bool = False
    """As on the real hub: the listing is public, the files require the token."""
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Earlier commits."""

    @property
    def commit(self) -> str:
        content = json.dumps({name: file_id(data) for name, data in self.files.items()}, sort_keys=True)
        return hashlib.sha1(content.encode()).hexdigest()

    def change(self, changes: dict[str, bytes | None]) -> None:
        """A new commit on main; None removes a file."""
        self.history[self.commit] = self.files
        merged = {**self.files, **changes}
        self.files = {name: data for name, data in merged.items() if data is not None}

    def at(self, revision: str | None) -> "Repo | None":
        """The repository at a revision; None if there is no such revision."""
        if revision in (None, "main", self.commit):
            return self
        return Repo(self.history[revision]) if revision in self.history else None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    token: str | None
    range: str | None


@dataclass
class FakeHub:
    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    """File -> number of bytes after which the connection is closed, once."""
    stalls: dict[str, int] = field(default_factory=dict)
    """File -> number of bytes after which the transfer stalls until `unblock` is set."""
    refused_tokens: set[str] = field(default_factory=set)
    failing_heads: set[str] = field(default_factory=set)
    """Files for which HEAD fails (403, which the library does not retry)."""
    moved: dict[str, str] = field(default_factory=dict)
    """Old name -> current name; as the real hub, it answers 307 with the new location."""
    accounts: dict[str, str] = field(default_factory=dict)
    """Token that may write -> name of its account."""
    visibility: dict[str, str] = field(default_factory=dict)
    """Of the repositories that were created by a request."""
    commit_messages: list[str] = field(default_factory=list)
    lfs_objects: dict[str, bytes] = field(default_factory=dict)
    unblock: threading.Event = field(default_factory=threading.Event)
    is_stalled: threading.Event = field(default_factory=threading.Event)

    def gets(self, file: str) -> int:
        """Number of downloads of a file."""
        return sum(r.method == "GET" and r.path.endswith(f"/{file}") and "/resolve/" in r.path for r in self.requests)

    @property
    def tokens(self) -> set[str | None]:
        return {request.token for request in self.requests}

    def environment(self, home: Path) -> dict[str, str]:
        """Environment for a process that uses only this hub; the library reads it at import."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
        }


def file_id(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._upload()

    def do_PUT(self) -> None:
        self._upload()

    def _upload(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        header = self.headers.get("Authorization")
        token = header.removeprefix("Bearer ") if header else None
        self.hub.requests.append(Request(self.command, path, token, None))
        if path.startswith(LFS_OBJECT):  # on the real hub a signed URL, without the token
            self.hub.lfs_objects[path.removeprefix(LFS_OBJECT)] = body
            return self._send(200, b"", {})
        if token is None or token in self.hub.refused_tokens:
            return self._refuse(401, None, "Invalid username or password.")
        account = self.hub.accounts.get(token)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body), account)
        match = UPLOAD.fullmatch(path) or LFS_BATCH.fullmatch(path)
        repo = self.hub.repos.get(match["name"]) if match else None
        if match is None or repo is None:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if match["name"].partition("/")[0] != account:
            return self._refuse(403, None, f"Forbidden for {token}")  # a proxy might echo the token
        if match.re is LFS_BATCH:
            actions = [self._lfs_action(wanted) for wanted in json.loads(body)["objects"]]
            return self._json({"transfer": "basic", "objects": actions})
        if match["verb"] == "preupload":
            return self._json({"files": [_upload_mode(file["path"]) for file in json.loads(body)["files"]]})
        return self._commit(match["name"], repo, [json.loads(line) for line in body.splitlines()])

    def _create(self, request: dict[str, Any], account: str | None) -> None:
        owner = request.get("organization") or account
        name = f"{owner}/{request['name']}"
        if owner != account:
            return self._refuse(403, None, "You don't have the rights to create a model under this namespace")
        if name in self.hub.repos:
            return self._send(409, json.dumps({"error": "exists", "url": f"{self.hub.url}/{name}"}).encode(), {})
        self.hub.repos[name] = Repo({})
        self.hub.visibility[name] = request.get("visibility", "public")
        return self._json({"url": f"{self.hub.url}/{name}"})

    def _lfs_action(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.hub.url}{LFS_OBJECT}{wanted['oid']}"}}}

    def _commit(self, name: str, repo: Repo, lines: list[dict[str, Any]]) -> None:
        changes: dict[str, bytes | None] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.commit_messages.append(value["summary"])
            elif line["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            else:
                changes[value["path"]] = self.hub.lfs_objects[value["oid"]]
        repo.change(changes)
        self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{repo.commit}", "commitOid": repo.commit})

    def _respond(self) -> None:
        path = unquote(urlsplit(self.path).path)
        header = self.headers.get("Authorization")
        token = header.removeprefix("Bearer ") if header else None
        self.hub.requests.append(Request(self.command, path, token, self.headers.get("Range")))
        is_file = "/resolve/" in path
        match = (RESOLVE if is_file else API).fullmatch(path)
        old = OLD_NAME.match(path)
        if old and old["name"] in self.hub.moved:
            return self._send(307, b"", {"Location": self.path.replace(old["name"], self.hub.moved[old["name"]], 1)})
        if token in self.hub.refused_tokens:
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        repo = self.hub.repos.get(match["name"]) if match else None
        kind = ("dataset" if match["kind"] else "model") if match and is_file else match and match["kind"]
        if match is None or repo is None or repo.kind != kind:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if repo.token is not None and token != repo.token:
            if not repo.gated:
                return self._refuse(401, "RepoNotFound", "Repository not found")
            if is_file:
                # The real hub does not echo the token; a proxy might.
                return self._refuse(403, "GatedRepo", f"Access is restricted for {token}")
        repo = repo.at(match["revision"])
        if repo is None:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if is_file:
            return self._file(repo, match["file"])
        if match["verb"] == "tree":
            is_recursive = "recursive=true" in urlsplit(self.path).query.lower()
            entries = _tree(repo, (match["directory"] or "").strip("/"), is_recursive)
            return self._json(entries) if entries else self._refuse(404, "EntryNotFound", "Entry not found")
        return self._json(_info(match["name"], repo))

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: Repo, name: str) -> None:
        if self.command == "HEAD" and name in self.hub.failing_heads:
            return self._refuse(403, None, "not now")
        if name not in repo.files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        data = repo.files[name]
        headers = {"ETag": f'"{file_id(data)}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        range_header = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if range_header:
            start = int(range_header[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            return self._send(206, data[start:], headers, name)
        return self._send(200, data, headers, name)

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.hub.breaks:
            body = body[: self.hub.breaks.pop(name)]
            self.close_connection = True
        elif name in self.hub.stalls:
            border = self.hub.stalls.pop(name)
            self.wfile.write(body[:border])
            self.wfile.flush()
            self.hub.is_stalled.set()
            self.hub.unblock.wait(limit(60))
            body = body[border:]
        self.wfile.write(body)


def _upload_mode(path: str) -> dict[str, Any]:
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


def _info(name: str, repo: Repo) -> dict[str, Any]:
    return {"id": name, "sha": repo.commit, "siblings": [{"rfilename": file} for file in repo.files]}


def _tree(repo: Repo, directory: str, recursive: bool) -> list[dict[str, Any]]:
    """Entries of a directory ("" is the root), and of its subdirectories if recursive."""
    prefix = f"{directory}/" if directory else ""
    entries: list[dict[str, Any]] = []
    directories: set[str] = set()
    for name, data in repo.files.items():
        if not name.startswith(prefix):
            continue
        parts = name.removeprefix(prefix).split("/")
        directories |= {prefix + "/".join(parts[:depth]) for depth in range(1, len(parts))}
        if len(parts) > 1 and not recursive:
            continue
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": file_id(data)[:40]}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": file_id(data), "size": len(data), "pointerSize": 130}
        entries.append(entry)
    listed = {path for path in directories if recursive or "/" not in path.removeprefix(prefix)}
    return [
        *({"type": "directory", "path": path, "size": 0, "oid": file_id(path.encode())[:40]} for path in listed),
        *entries,
    ]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Silent: some tests kill the client during a transfer."""


@contextmanager
def serve(host: str = "127.0.0.1", port: int = 0) -> Iterator[FakeHub]:
    hub = FakeHub()
    server = _Server((host, port), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://{host}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.unblock.set()
        server.shutdown()
        server.server_close()
