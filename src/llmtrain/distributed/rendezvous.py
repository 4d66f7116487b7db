"""Waits for the master with a deadline: first for its name to resolve, then for its port to accept connections.

Pods start in any order, so both failures are normal for a while; the log says which one it is.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmtrain.config.distributed import DistributedSection
from llmtrain.core.env import DIST_TIMEOUT, MASTER_READY_TIMEOUT
from llmtrain.core.logs import log
from llmtrain.errors import JoinError, UsageError

# Environment variables in order of precedence; the others are those of ColossalAI's Kubernetes guide.
DIST_TIMEOUTS = (DIST_TIMEOUT, "COLOSSALAI_DIST_TIMEOUT")
MASTER_READY_TIMEOUTS = (MASTER_READY_TIMEOUT, "COLOSSALAI_MASTER_READY_TIMEOUT")
FIRST_PAUSE_SEC = 0.1
LONGEST_PAUSE_SEC = 2.0
CONNECT_SEC = 3.0  # a lost SYN is retransmitted after 1 s; after this time a new attempt is better
LOOKUP_SEC = 2.0
EARLIER_START_ENDED = "the earlier start of this run has ended; joining the next one"

REMEDIES = {
    "name": "Set MASTER_ADDR to the DNS name of pod 0 (<job>-0.<service>). It resolves if a headless Service "
    "(clusterIP: None) selects the pods, publishNotReadyAddresses is true, and the pods' subdomain is that Service.",
    "refused": "The master has not started, has ended, or listens on another port: check the log of rank 0 and "
    "MASTER_PORT.",
    "no_route": "The address is wrong or unreachable from here: check MASTER_ADDR, and look for a NetworkPolicy or a "
    "firewall.",
    "timeout": "The master does not answer: look for a NetworkPolicy (the pods of a run need all ports between them) "
    "or a firewall, and check that MASTER_ADDR is the DNS name of pod 0.",
}


@dataclass(frozen=True)
class _Failure:
    kind: str  # a key of REMEDIES
    text: str
    is_cut: bool = False  # the deadline ended the attempt: the failure of the attempt before is more informative


def deadline_sec(names: Sequence[str], configured: int, environ: Mapping[str, str]) -> float:
    """Seconds from the first of these environment variables that is set, else from the config."""
    variables = [name for name in names if environ.get(name, "").strip()]
    if not variables:
        return float(configured)
    name = variables[0]
    text = environ[variables[0]].strip()
    if len(variables) > 1:
        log("DDP", f"{name} is used, {variables[1]} is ignored", logging.DEBUG)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(
            f"{name} must be a positive number of seconds, got {text!r}.", remedy="Set it to seconds, or unset it."
        )
    return value


def join_deadline_sec(distributed: DistributedSection, environ: Mapping[str, str]) -> float:
    return deadline_sec(DIST_TIMEOUTS, distributed.join_timeout_sec, environ)


def ready_deadline_sec(distributed: DistributedSection, environ: Mapping[str, str]) -> float:
    return deadline_sec(MASTER_READY_TIMEOUTS, distributed.master_ready_timeout_sec, environ)


def wait_for_master(host: str, port: int, timeout_sec: float, *, progress_sec: float = 10.0) -> float:
    """Wait until the master's port accepts connections; returns the seconds waited. JoinError at the deadline."""
    started = time.monotonic()
    deadline = started + timeout_sec
    pause = FIRST_PAUSE_SEC
    next_line = started + progress_sec
    lookup = _Lookup(host, port)
    failure = None
    while True:
        latest = _attempt(lookup, deadline)
        now = time.monotonic()
        waited = now - started
        if latest is None:
            return waited
        if failure is None or not latest.is_cut:
            failure = latest
        if now >= deadline:
            raise _join_error(host, port, failure, waited)
        if now >= next_line:
            log("DDP", f"waiting for the master {host}:{port}: {failure.text} ({waited:.0f} of {timeout_sec:g} s)")
            next_line = now + progress_sec
        time.sleep(max(0.0, min(pause, deadline - now, next_line - now)))
        pause = min(2 * pause, LONGEST_PAUSE_SEC)


class _Lookup:
    """Name resolution in a thread: getaddrinfo has no timeout, and a DNS server may not answer."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._thread: threading.Thread | None = None
        self._answer: list[Any] | Exception = []

    def _resolve(self) -> None:
        try:
            self._answer = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
            self._answer = error

    def addresses(self, deadline: float) -> list[Any] | _Failure:
        """Resolved on each call, because a pod that was replaced has another address."""
        if self._thread is None:  # else the lookup of the previous call is still running
            self._thread = threading.Thread(target=self._resolve, name="llmtrain-lookup", daemon=True)
            self._thread.start()
        remaining = deadline - time.monotonic()
        self._thread.join(max(0.0, min(LOOKUP_SEC, remaining)))
        if self._thread.is_alive():
            text = f"the name {self.host} does not resolve: no answer from DNS yet"
            return _Failure("name", text, is_cut=remaining < LOOKUP_SEC)
        self._thread = None
        if isinstance(self._answer, Exception):
            reason = getattr(self._answer, "strerror", None) or self._answer
            return _Failure("name", f"the name {self.host} does not resolve: {reason}")
        return self._answer


def _attempt(lookup: _Lookup, deadline: float) -> _Failure | None:
    addresses = lookup.addresses(deadline)
    if isinstance(addresses, _Failure):
        return addresses
    failures = []
    for family, kind, protocol, _, address in addresses:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            break
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(min(CONNECT_SEC, remaining))
                probe.connect(address)
            return None
        except OSError as error:
            failures.append(_describe(error, address[0], is_cut=remaining < CONNECT_SEC))
    # Of several addresses, report the failure that came closest to a connection.
    order = ("refused", "timeout", "no_route")
    nothing = _Failure("timeout", "no time was left to connect", is_cut=True)
    return min(failures, key=lambda failure: order.index(failure.kind), default=nothing)


def _describe(error: OSError, address: str, *, is_cut: bool) -> _Failure:
    if isinstance(error, ConnectionRefusedError | ConnectionResetError):
        return _Failure("refused", f"connection refused by {address}")
    if isinstance(error, TimeoutError):
        return _Failure("timeout", f"{address} does not answer (timed out)", is_cut)
    return _Failure("no_route", f"no route to {address} ({error.strerror or error})")


def _join_error(host: str, port: int, failure: _Failure, waited_sec: float) -> JoinError:
    error = JoinError(
        f"The master {host}:{port} could not be reached within {waited_sec:.1f} s: {failure.text}.",
        remedy=REMEDIES[failure.kind],
        reason="master_unreachable",
    )
    error.details = {"host": host, "port": port, "failed": failure.kind, "waited_sec": round(waited_sec, 3)}
    return error
