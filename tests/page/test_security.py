"""Who may see the page: every rule of page/security.py, over the whole application."""

import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from starlette.testclient import TestClient

from demo_runs import make_run
from llmtrain.page.run_catalog import RunCatalog
from llmtrain.page.security import MAX_AGE_SEC, Access, session_key
from llmtrain.page.server import make_app

BASE = "http://127.0.0.1:8642"
PATHS = ("/", "/api/session", "/api/runs", "/api/log", "/api/stream", "/static/app.js", "/nothing", "/static/../x")
PARSED_AS_HTML = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")


@pytest.fixture
def access() -> Access:
    return Access(port=8642)


@pytest.fixture
def client(tmp_path: Path, access: Access) -> Iterator[TestClient]:
    make_run(tmp_path, "first", steps=20)
    with TestClient(make_app(RunCatalog(str(tmp_path)), access), base_url=BASE, follow_redirects=False) as client:
        yield client


@pytest.fixture
def inside(client: TestClient, access: Access) -> TestClient:
    """A client that has the cookie."""
    assert client.get("/", params={"token": access.token}).status_code == 200
    return client


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_sent_without_cookie(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 401
    assert "first" not in response.text


def test_token_is_exchanged_for_strict_cookie(client: TestClient, access: Access) -> None:
    response = client.get("/", params={"token": access.token})
    cookie = response.headers["set-cookie"].lower()
    assert cookie.startswith("llmtrain-page-8642=")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert access.token not in response.text + str(response.headers)
    assert client.get("/").status_code == 200
    assert client.get("/api/runs").json()["rows"][0]["run_id"] == "first"


def test_cookie_is_secure_with_tls(tmp_path: Path) -> None:
    access = Access(port=8642, is_tls=True)
    with TestClient(make_app(RunCatalog(str(tmp_path)), access), base_url="https://127.0.0.1:8642") as client:
        assert "secure" in client.get("/", params={"token": access.token}).headers["set-cookie"].lower()


@pytest.mark.parametrize("token", ["", "x", "ä", "0" * 43])
def test_wrong_token_is_refused(client: TestClient, token: str) -> None:
    response = client.get("/", params={"token": token})
    assert response.status_code in (401, 403)
    assert "set-cookie" not in response.headers
    assert set(response.json()) == {"what", "remedy"}


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example:8642",
        "127.0.0.1",
        "127.0.0.1:80",
        "192.168.0.1:8642",
        "localhost.attacker.example:8642",
        "attacker.example@127.0.0.1:8642",
        "127.0.0.1:8642/attacker.example",
        "",
    ],
)
def test_other_host_name_is_refused(inside: TestClient, host: str, access: Access) -> None:
    """DNS rebinding: the browser sends the name of the attacker's site, also with a token."""
    assert inside.get("/api/runs", headers={"host": host}).status_code == 421
    assert inside.get("/", params={"token": access.token}, headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["127.0.0.1:8642", "localhost:8642", "[::1]:8642"])
def test_loopback_names_are_accepted(inside: TestClient, host: str) -> None:
    cookie = "; ".join(f"{name}={value}" for name, value in inside.cookies.items())
    assert inside.get("/api/runs", headers={"host": host, "cookie": cookie}).status_code == 200


def test_own_address_is_accepted_and_names_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Access(port=8642, host="127.0.0.2").is_own_host("127.0.0.2:8642")
    asked = []
    monkeypatch.setattr(socket, "getfqdn", lambda: asked.append(1) or "machine.example")
    access = Access(port=8642, host="0.0.0.0", is_tls=True)
    assert all(access.is_own_host(f"{name}:8642") for name in ("machine.example", "Machine.example", "10.0.0.1"))
    assert not access.is_own_host("attacker.example:8642")
    assert len(asked) == 1  # a name server may be slow


@pytest.mark.parametrize(
    "origin",
    ["http://attacker.example", "http://127.0.0.1:8643", "https://127.0.0.1:8642", "null", "http://127.0.0.1:8642.x"],
)
def test_other_origin_is_refused(inside: TestClient, origin: str) -> None:
    response = inside.get("/api/runs", headers={"origin": origin})
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_request_of_other_site_is_refused(inside: TestClient, site: str) -> None:
    assert inside.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 403


def test_preflight_is_refused_without_cors_headers(inside: TestClient) -> None:
    headers = {"origin": "http://attacker.example", "access-control-request-method": "POST"}
    response = inside.options("/api/actions", headers=headers)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control-")]


def test_every_answer_has_security_headers(client: TestClient, access: Access) -> None:
    answers = [client.get(path) for path in PATHS[:4]]
    client.get("/", params={"token": access.token})
    answers += [client.get(path) for path in ("/", "/api/runs", "/static/app.js", "/nothing", "/api/run")]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


def test_page_has_no_inline_script_or_style(repo: Path) -> None:
    static = repo / "src" / "llmtrain" / "page" / "static"
    html = (static / "index.html").read_text()
    assert "<script>" not in html
    assert "style=" not in html
    assert "http:" not in html + "".join(path.read_text() for path in static.glob("*.css"))
    for path in static.glob("*.js"):
        text = path.read_text()
        assert not [
            word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(") if word in text
        ], path


def test_cookie_survives_restart_with_same_key(inside: TestClient, tmp_path: Path, access: Access) -> None:
    again = Access(port=8642, key=access.key)
    assert again.token != access.token
    with TestClient(make_app(RunCatalog(str(tmp_path)), again), base_url=BASE, cookies=inside.cookies) as client:
        assert client.get("/api/runs").status_code == 200
    with TestClient(
        make_app(RunCatalog(str(tmp_path)), Access(port=8642)), base_url=BASE, cookies=inside.cookies
    ) as client:
        assert client.get("/api/runs").status_code == 401


def test_cookie_is_bound_to_port_and_expires(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    cookie = access.new_cookie()
    assert access.is_valid(cookie)
    assert not Access(port=8643, key=access.key).is_valid(cookie)
    assert not access.is_valid(cookie[:-1] + ("0" if cookie[-1] != "0" else "1"))
    assert not access.is_valid(access.csrf_token(cookie))
    later = time.time() + MAX_AGE_SEC + 5
    monkeypatch.setattr(time, "time", lambda: later)
    assert not access.is_valid(cookie)


def test_session_key_is_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "key"
    key = session_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert session_key(path) == key
    path.chmod(0o644)  # somebody may have read it
    assert session_key(path) != key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_session_key_without_place_for_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(session_key(tmp_path / "file" / "key")) == 32
    (tmp_path / "link").symlink_to("/dev/null")
    assert len(session_key(tmp_path / "link")) == 32


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_page_is_read_only_by_default(inside: TestClient, method: str) -> None:
    assert inside.request(method, "/api/actions", headers={"origin": BASE}).status_code == 405
    assert inside.get("/api/session").json()["csrf"] is None


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?key=local/../../etc",
        "/api/run?key=local/%2e%2e",
        "/api/log?key=local/first&rank=0/../../meta",
        "/api/samples?key=local/first&step=../../meta",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
    ],
)
def test_paths_cannot_leave_run_directory(inside: TestClient, path: str) -> None:
    assert inside.get(path).status_code in (400, 404)


def test_links_out_of_run_directory_are_not_followed(inside: TestClient, tmp_path: Path) -> None:
    secret = tmp_path.parent / "secret.log"
    secret.write_text("secret\n")
    log = tmp_path / "first" / "logs" / "train.log"
    log.unlink()
    log.symlink_to(secret)
    response = inside.get("/api/log", params={"key": "local/first", "rank": 0})
    assert response.status_code == 404
    assert "secret\n" not in response.text


def test_websocket_is_refused(inside: TestClient) -> None:
    with pytest.raises(Exception), inside.websocket_connect("/api/stream"):  # noqa: B017, PT011
        pass
