"""Starting and ending the server of the page."""

import json
import logging
import os
import signal
import socket
import ssl
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from llmtrain.core.interrupts import stop_signals
from llmtrain.core.terminal import say
from llmtrain.errors import ClusterError, UsageError
from llmtrain.page.run_catalog import RunCatalog
from llmtrain.page.security import Access, is_loopback, key_path, session_key
from llmtrain.page.server import make_app

if TYPE_CHECKING:
    from llmtrain.page.cluster_runs import ClusterRuns

SHUTDOWN_SEC = 1
KEEP_ALIVE_SEC = 30


@dataclass(frozen=True)
class ServeOptions:
    root: str
    host: str
    port: int
    certfile: str | None
    keyfile: str | None
    open_browser: bool
    allow_actions: bool
    as_json: bool = False


def serve(options: ServeOptions, cluster: "ClusterRuns | None") -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    _check_tls(options)
    listener = listen(options.host, options.port)
    access = Access(
        port=listener.getsockname()[1],
        host=options.host,
        is_tls=options.certfile is not None,
        allow_actions=options.allow_actions,
        key=session_key(key_path()),
    )
    catalog = RunCatalog(options.root, cluster)
    threading.Thread(target=catalog.local.refresh, daemon=True).start()  # before the first viewer waits for it
    config = uvicorn.Config(
        make_app(catalog, access),
        log_level="error",
        access_log=False,  # its lines would contain the token
        server_header=False,
        proxy_headers=False,
        ssl_certfile=options.certfile,
        ssl_keyfile=options.keyfile,
        timeout_graceful_shutdown=SHUTDOWN_SEC,
        timeout_keep_alive=KEEP_ALIVE_SEC,
    )
    if options.as_json:
        say(json.dumps(_description(options, access)))
    else:
        say(f"Page: {access.url}")
    say("Stop it with Ctrl-C." if options.allow_actions else "Stop it with Ctrl-C. It is read-only.", sys.stderr)
    try:
        with _ended_by_signals(), listener, _opened(access.url if options.open_browser else None):
            _server(config, catalog).run(sockets=[listener])
    finally:
        if cluster:
            cluster.close()


def _description(options: ServeOptions, access: Access) -> dict[str, object]:
    """Printed once the page can be opened, on one line: the command runs on."""
    return {"url": access.url, "port": access.port, "root": options.root, "allow_actions": options.allow_actions}


def _server(config: uvicorn.Config, catalog: RunCatalog) -> uvicorn.Server:
    """A server whose streams end by themselves. What does not end in time is cut off, which is not an error."""
    server = uvicorn.Server(config)
    handle_exit = server.handle_exit
    stopping = stop_signals()

    def end(number: int, frame: FrameType | None) -> None:
        if number not in stopping:  # uvicorn handles SIGINT also where it is ignored
            return
        catalog.is_closing = True
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        handle_exit(number, frame)

    server.handle_exit = end
    return server


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end the block, after its files are removed. The server handles the first
    two itself while it runs, and raises them again at its end."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in stop_signals()}
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_tls(options: ServeOptions) -> None:
    if (options.certfile is None) is not (options.keyfile is None):
        raise UsageError("--certfile and --keyfile must be passed together.")
    if options.certfile is None and not is_loopback(options.host):
        raise UsageError(
            f"--host {options.host} lets other machines connect, which requires TLS.",
            remedy="Pass --certfile and --keyfile, or use an SSH tunnel: ssh -L 8642:127.0.0.1:8642 THIS-MACHINE",
        )
    if options.certfile and options.keyfile:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(options.certfile, options.keyfile)
        except (OSError, ssl.SSLError) as problem:
            raise UsageError(f"Cannot use {options.certfile} with {options.keyfile}: {problem}.") from None


def listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except socket.gaierror as problem:
        raise UsageError(f"--host {host}: {problem.strerror}.") from None
    except OSError as problem:
        raise ClusterError(
            f"Cannot listen on {host} port {port}: {problem.strerror or problem}.",
            remedy="If the page is already running, use its URL; else pass another --port, or 0 for any free port.",
        ) from None
    return listener


@contextmanager
def _opened(url: str | None) -> Iterator[None]:
    """Open the browser with a private file that leads to the URL: arguments of processes can be read by all users."""
    path = None
    if url is not None:
        with suppress(OSError):
            descriptor, name = tempfile.mkstemp(prefix="llmtrain-page-", suffix=".html")
            path = Path(name)
            with os.fdopen(descriptor, "w") as file:
                file.write(f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={url}">')
        threading.Thread(target=_open_browser, args=(path,), daemon=True).start()  # some wait until the browser ends
    try:
        yield
    finally:
        if path is not None:
            path.unlink(missing_ok=True)


def _open_browser(path: Path | None) -> None:
    has_opened = False
    with suppress(webbrowser.Error, OSError):
        if path is not None and not _is_for_terminal(webbrowser.get()):
            has_opened = webbrowser.open(path.as_uri())
    if not has_opened:
        say("No browser was found. Open the URL yourself.", sys.stderr)


def _is_for_terminal(browser: webbrowser.BaseBrowser) -> bool:
    """Such as w3m: it runs no scripts, and would take over the terminal. A command in $BROWSER may be anything."""
    return type(browser) is webbrowser.GenericBrowser and not os.environ.get("BROWSER")
