"""Who may see the page. One middleware, AccessCheck, checks every request.

- The printed URL has a random token, which is exchanged for a cookie: HttpOnly, SameSite=Strict, with the port in its
  name, because browsers send a cookie to every port of a host. The key that signs cookies is in a file that only its
  owner may read, so that an open page survives a restart of the server.
- The Host header must name this server: a page of another site may resolve its own name to 127.0.0.1 (DNS rebinding).
- Requests from another origin are refused, and no CORS header is ever sent.
- Scripts, styles and requests are limited to this server by a Content-Security-Policy without inline code.
- A POST needs --allow-actions, an Origin of this server and a CSRF token.
"""

import hashlib
import hmac
import html
import ipaddress
import json
import os
import secrets
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmtrain.core.logs import warn

MAX_AGE_SEC = 30 * 86400
CSRF_HEADER = "x-csrf-token"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_ENTER = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/"><title>llmtrain</title>'
    '<link rel="icon" href="/static/icon.svg">'
    '<p>Opening <a href="/">the page</a>.'
)
_KEY_BYTES = 32
_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass
class Access:
    """What a request must present."""

    port: int
    host: str = "127.0.0.1"
    is_tls: bool = False
    allow_actions: bool = False
    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def cookie_name(self) -> str:
        return f"llmtrain-page-{self.port}"

    @property
    def scheme(self) -> str:
        return "https" if self.is_tls else "http"

    @property
    def url(self) -> str:
        """The page with its token."""
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host
        shown = f"[{name}]" if ":" in name else name
        return f"{self.scheme}://{shown}:{self.port}/?token={self.token}"

    def new_cookie(self) -> str:
        issued = str(int(time.time()))
        return f"{issued}.{self._sign('session', issued)}"

    def is_valid(self, cookie: str) -> bool:
        issued, _, signature = cookie.partition(".")
        if not issued.isdecimal() or len(issued) > 12 or time.time() - int(issued) > MAX_AGE_SEC:
            return False
        return hmac.compare_digest(signature.encode(), self._sign("session", issued).encode())

    def csrf_token(self, cookie: str) -> str:
        return self._sign("csrf", cookie)

    def _sign(self, purpose: str, text: str) -> str:
        message = f"{purpose}|{self.port}|{text}".encode()
        return hmac.new(self.key, message, hashlib.sha256).hexdigest()

    def is_own_host(self, header: str) -> bool:
        """Whether a Host header names this server. Behind --host any IP address does: rebinding needs a name."""
        with suppress(ValueError):
            parts = urlsplit(f"//{header}")
            if parts.netloc != header or "@" in header:  # more than a name and a port
                return False
            if parts.port == self.port or (parts.port is None and self.port == (443 if self.is_tls else 80)):
                name = (parts.hostname or "").lower()
                return name in self._names or (not is_loopback(self.host) and _is_address(name))
        return False

    @cached_property
    def _names(self) -> set[str]:
        """Once: getfqdn may ask a name server."""
        names = {self.host.lower(), *_LOOPBACK_NAMES}
        return names if is_loopback(self.host) else {*names, socket.gethostname().lower(), socket.getfqdn().lower()}

    def is_own_origin(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme == self.scheme and self.is_own_host(host)


class AccessCheck:
    """The middleware: every request passes here, also those for static files and unknown paths."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
                message["headers"] = [*message["headers"], *added]
                if b"cache-control" not in own:
                    message["headers"].append((b"cache-control", b"no-store"))
            await send(message)

        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        answer = self._check(scope, headers)
        if answer is not None and "text/html" in headers.get("accept", ""):
            answer = _as_page(answer)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _check(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """The answer to a request that is not passed on; None: it is allowed."""
        access = self._access
        method = scope["method"]
        if not access.is_own_host(headers.get("host", "")):
            return refusal(
                421, "This server does not have that host name.", "Open the URL that `llmtrain page` printed."
            )
        origin = headers.get("origin")
        if origin is not None and not access.is_own_origin(origin):
            return refusal(403, "Requests from other sites are not allowed.", "Open the page in its own tab.")
        tokens = parse_qs(scope["query_string"].decode("latin-1")).get("token", [])
        if scope["path"] == "/" and method == "GET" and tokens:
            return self._enter(tokens[0])
        site = headers.get("sec-fetch-site", "none")
        if site not in ("same-origin", "none") and not (scope["path"] == "/" and method == "GET"):
            return refusal(403, "Requests from other sites are not allowed.", "Open the page in its own tab.")
        cookie = read_cookie(headers, access.cookie_name)
        if not access.is_valid(cookie):
            return refusal(401, "This browser has no session, or it has expired.", _OPEN_AGAIN)
        if method in ("GET", "HEAD"):
            return None
        if method != "POST" or not access.allow_actions:
            return refusal(405, "The page is read-only.", "Start it with --allow-actions to stop or resume runs.")
        sent = headers.get(CSRF_HEADER, "").encode()
        if origin is None or not hmac.compare_digest(sent, access.csrf_token(cookie).encode()):
            return refusal(403, "The request does not come from this page.", "Reload the page.")
        return None

    def _enter(self, token: str) -> Response:
        """A page that opens the page: a redirect would count as a request of the site that linked here, for which
        browsers do not send a SameSite=Strict cookie."""
        if not hmac.compare_digest(token.encode(), self._access.token.encode()):
            return refusal(403, "The token in the URL is not valid.", _OPEN_AGAIN)
        response = HTMLResponse(_ENTER)
        response.set_cookie(
            self._access.cookie_name,
            self._access.new_cookie(),
            max_age=MAX_AGE_SEC,
            secure=self._access.is_tls,
            httponly=True,
            samesite="strict",
        )
        return response


_OPEN_AGAIN = "Open the URL that `llmtrain page` printed when it was started last."


def refusal(status: int, what: str, remedy: str) -> Response:
    return JSONResponse({"what": what, "remedy": remedy}, status)


def _as_page(answer: Response) -> Response:
    """A refusal for a person: the browser shows it in place of the page."""
    if answer.media_type != "application/json":
        return answer
    values = json.loads(bytes(answer.body))
    text = f"<h1>{html.escape(values['what'])}</h1><p>{html.escape(values['remedy'])}"
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>llmtrain</title>'
    return HTMLResponse(f"{head}{text}", answer.status_code)


def read_cookie(headers: dict[str, str], name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def session_key(path: Path) -> bytes:
    """The key in a file of mode 0600, created if it is missing. A file that others could read is replaced. Where it
    cannot be written, pages do not survive a restart of the server."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor) as file:
            status = os.fstat(descriptor)
            if stat.S_IMODE(status.st_mode) & 0o077 == 0 and status.st_uid == os.getuid():
                key = bytes.fromhex(file.read(4 * _KEY_BYTES).strip())
                if len(key) == _KEY_BYTES:
                    return key
    key = secrets.token_bytes(_KEY_BYTES)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(key.hex())
        temporary.replace(path)
    except OSError as problem:
        warn("PAGE", f"cannot write {path} ({problem.strerror}); open pages must be reloaded after a restart")
    return key


def key_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "llmtrain" / "page-session-key"
