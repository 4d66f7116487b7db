"""Checks of the connection to the master: name, port, interface, and the interface variables of gloo and NCCL."""

import re
import socket
from collections.abc import Iterator, Mapping

from llmtrain.core.findings import Finding, failed, passed, warned
from llmtrain.distributed.network import interface_to
from llmtrain.distributed.rendezvous import REMEDIES, wait_for_master
from llmtrain.doctor.environment import Master
from llmtrain.errors import JoinError

PROBE_SEC = 3.0  # a check reports soon; the start of a run waits longer for its master


def route_to_master(master: Master, node_rank: int | None) -> Iterator[Finding]:
    """The name of the master, and the interface of the route to it."""
    host = master.host
    try:
        rows = socket.getaddrinfo(host, master.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        yield failed("master name", f"{host} does not resolve: {reason}", REMEDIES["name"])
        return
    addresses = sorted({str(row[4][0]) for row in rows})
    yield passed("master name", f"{host} is {', '.join(addresses)}")
    interface = interface_to(host)
    if interface is None:
        yield warned(
            "interface",
            f"the interface of the route to {host} is unknown",
            "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME; `ip route get <address>` shows the interface.",
        )
    elif interface == "lo" and node_rank:
        yield warned(
            "interface",
            f"{host} resolves to this machine (lo), but this is node rank {node_rank}: the master is node rank 0",
            "Set MASTER_ADDR to the DNS name of pod 0, such as <job>-0.<service>. Ignore this if all nodes are on one "
            "machine.",
        )
    else:
        yield passed("interface", f"{interface} has the route to {host}")


def master_port(master: Master) -> Iterator[Finding]:
    """Whether the port accepts connections, or is free if this process hosts it."""
    if master.is_hosted_here:
        problem = _why_not_free(master.port)
        if problem is None:
            yield passed("master port", f"port {master.port} is free: this process will listen on it")
        else:
            yield failed(
                "master port",
                f"cannot listen on port {master.port}: {problem}",
                f"Stop the program that uses the port (`ss -ltnp 'sport = :{master.port}'` shows it; it may be this "
                "run), or set MASTER_PORT to a free port, the same on every node.",
            )
        return
    try:
        waited_sec = wait_for_master(master.host, master.port, PROBE_SEC)
    except JoinError as error:
        if error.details.get("failed") != "name":  # reported by the check of the name
            yield failed("master port", error.what, error.remedy)
        return
    yield passed("master port", f"{master.host}:{master.port} answered in {1000 * waited_sec:.0f} ms")


def _why_not_free(port: int) -> str | None:
    """Listens as TCPStore does: on all addresses, and despite connections in TIME_WAIT."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=is_dual).close()
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def chosen_interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the configured interfaces exist. gloo matches complete names, NCCL prefixes."""
    known = sorted(name for _, name in socket.if_nameindex())
    for variable, matches in (("GLOO_SOCKET_IFNAME", _gloo_matches), ("NCCL_SOCKET_IFNAME", _nccl_matches)):
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if matches(text, known):
            yield passed(variable, f"{text}, one of {', '.join(known)}")
        else:
            yield failed(
                variable,
                f"{variable} is {text!r}, but the interfaces of this machine are {', '.join(known)}",
                f"Unset {variable}: llmtrain then uses the interface of the route to the master.",
            )


def _gloo_matches(text: str, known: list[str]) -> bool:
    return all(name.strip() in known for name in text.split(","))


def _nccl_matches(text: str, known: list[str]) -> bool:
    """Whether any interface matches: `eth` is a prefix, `=eth0` an exact name, `^docker,lo` excludes."""
    match = re.match(r"(\^?)(=?)(.*)", text)
    assert match is not None
    is_exclusion = bool(match[1])
    is_exact = bool(match[2])
    names = tuple(name.strip() for name in match[3].split(","))

    def is_named(interface: str) -> bool:
        return interface in names if is_exact else interface.startswith(names)

    return any(is_named(interface) is not is_exclusion for interface in known)
