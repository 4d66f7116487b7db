"""Waiting for the master, with a deadline: first its name, then its port.

Pods start in any order, so a name that does not resolve and a refused connection are normal for a while. What
people need is to see which of them it is now, and an end.
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
from llmtrain.env import DIST_TIMEOUT, MASTER_READY_TIMEOUT
from llmtrain.errors import JoinError, UsageError
from llmtrain.logs import log

# Environment variables, ours first; the others are those of ColossalAI's guide for Kubernetes.
DIST_TIMEOUTS = (DIST_TIMEOUT, "COLOSSALAI_DIST_TIMEOUT")
MASTER_READY_TIMEOUTS = (MASTER_READY_TIMEOUT, "COLOSSALAI_MASTER_READY_TIMEOUT")
FIRST_PAUSE_SEC = 0.1
LONGEST_PAUSE_SEC = 2.0
CONNECT_SEC = 3.0  # a lost SYN is sent again after 1 s; longer than this and a new attempt is better
LOOKUP_SEC = 2.0

REMEDIES = {
    "name": "Use pod 0's own name (<job>-0.<service>). It resolves when a headless Service (clusterIP: None) selects "
    "the pods, publishNotReadyAddresses is true, and the pods' subdomain is that Service.",
    "refused": "The master has not started, has ended, or listens on another port: look at the log of rank 0, and "
    "compare MASTER_PORT.",
    "no_route": "The address is wrong or unreachable from here: check MASTER_ADDR, a NetworkPolicy, a firewall.",
    "timeout": "Nothing answers: check a NetworkPolicy (pods of a run must reach each other on all ports), a "
    "firewall, and that MASTER_ADDR is pod 0's own name.",
}


@dataclass(frozen=True)
class _Failure:
    kind: str  # a key of REMEDIES
    text: str
    is_cut: bool = False  # the deadline came before an answer could: what failed before tells more


def deadline_sec(names: Sequence[str], configured: int, environ: Mapping[str, str]) -> float:
    """Seconds from the first of these environment variables that is set, else from the config."""
    found = [name for name in names if environ.get(name, "").strip()]
    if not found:
        return float(configured)
    name, text = found[0], environ[found[0]].strip()
    if len(found) > 1:
        log("DDP", f"{name} is used, {found[1]} is ignored", logging.DEBUG)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name} is {text!r}, which is no positive number.", remedy="Set it to seconds, or unset it.")
    return value


def join_deadline_sec(distributed: DistributedSection, environ: Mapping[str, str]) -> float:
    return deadline_sec(DIST_TIMEOUTS, distributed.join_timeout_sec, environ)


def ready_deadline_sec(distributed: DistributedSection, environ: Mapping[str, str]) -> float:
    return deadline_sec(MASTER_READY_TIMEOUTS, distributed.master_ready_timeout_sec, environ)


def wait_for_master(host: str, port: int, timeout_sec: float, *, progress_sec: float = 10.0) -> float:
    """Return when the master's port answers, with the seconds that took; JoinError at the deadline."""
    started = time.monotonic()
    deadline = started + timeout_sec
    pause, next_line = FIRST_PAUSE_SEC, started + progress_sec
    lookup, failure = _Lookup(host, port), None
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
    """Name resolution in a thread of its own: getaddrinfo takes no timeout, and a DNS server may be silent."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self._thread: threading.Thread | None = None
        self._answer: list[Any] | Exception = []

    def _ask(self) -> None:
        try:
            self._answer = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # UnicodeError: a label of the name is too long
            self._answer = error

    def addresses(self, deadline: float) -> list[Any] | _Failure:
        """Asked anew each time, because a pod that was replaced has another address; an open question goes on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name="llmtrain-lookup", daemon=True)
            self._thread.start()
        left = deadline - time.monotonic()
        self._thread.join(max(0.0, min(LOOKUP_SEC, left)))
        if self._thread.is_alive():
            text = f"the name {self.host} does not resolve: no answer from DNS yet"
            return _Failure("name", text, is_cut=left < LOOKUP_SEC)
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
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(min(CONNECT_SEC, left))
                probe.connect(address)
            return None
        except OSError as error:
            failures.append(_describe(error, address[0], is_cut=left < CONNECT_SEC))
    # Of several addresses, the one that is nearest to an answer tells most.
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
