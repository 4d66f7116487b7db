"""The way to the master: its name, its port, the interface that leads there, and what gloo and NCCL were told."""

import re
import socket
from collections.abc import Iterator, Mapping

from llmtrain.distributed.network import interface_to
from llmtrain.distributed.rendezvous import REMEDIES, wait_for_master
from llmtrain.doctor.environment import Master
from llmtrain.errors import JoinError
from llmtrain.findings import Finding, failed, passed, warned

PROBE_SEC = 3.0


def way_to_master(master: Master, node_rank: int | None) -> Iterator[Finding]:
    """Its name, and the interface that leads there."""
    host = master.host
    try:
        rows = socket.getaddrinfo(host, master.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        yield failed("master name", f"{host} does not resolve: {reason}", REMEDIES["name"])
        return
    yield passed("master name", f"{host} is {', '.join(sorted({str(row[4][0]) for row in rows}))}")
    interface = interface_to(host)
    if interface is None:
        yield warned(
            "interface",
            f"no interface here is known to lead to {host}",
            "Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME by hand; `ip route get <address>` shows the name.",
        )
    elif interface == "lo" and node_rank:
        yield warned(
            "interface",
            f"{host} leads back to this machine (lo), but this is node {node_rank}: the master is node 0",
            "Set MASTER_ADDR to node 0's own name, such as <job>-0.<service>. With all nodes on one machine, fine.",
        )
    else:
        yield passed("interface", f"{interface} leads to {host}")


def master_port(master: Master) -> Iterator[Finding]:
    """Whether it answers; on the side that hosts it, whether it is free to listen on."""
    if master.is_hosted_here:
        problem = _why_not_free(master.port)
        if problem is None:
            yield passed("master port", f"port {master.port} is free: this process will listen on it")
        else:
            yield failed(
                "master port",
                f"port {master.port} cannot be listened on: {problem}",
                f"This run already, or another program has it (`ss -ltnp 'sport = :{master.port}'` shows which). End "
                "that one, or set MASTER_PORT to a free port, the same on every node.",
            )
        return
    try:
        waited_sec = wait_for_master(master.host, master.port, PROBE_SEC)
    except JoinError as error:
        if error.details.get("failed") != "name":  # that is told by the check of the name
            yield failed("master port", error.what, error.remedy)
        return
    yield passed("master port", f"{master.host}:{master.port} answered in {1000 * waited_sec:.0f} ms")


def _why_not_free(port: int) -> str | None:
    """As TCPStore listens: on all addresses, and over the remains of a connection that has just been closed."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, reuse_port=False
        ).close()
    except OSError as problem:
        return problem.strerror or str(problem)
    return None


def chosen_interfaces(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Each library reads its variable in its own way: gloo whole names, NCCL the beginnings of names."""
    known = sorted(name for _, name in socket.if_nameindex())
    for variable, is_there in (("GLOO_SOCKET_IFNAME", _gloo_finds), ("NCCL_SOCKET_IFNAME", _nccl_finds)):
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if is_there(text, known):
            yield passed(variable, f"{text}, of {', '.join(known)}")
        else:
            yield failed(
                variable,
                f"{variable} is {text!r}, but the interfaces here are {', '.join(known)}",
                f"Unset {variable}: llmtrain then takes the interface that leads to the master.",
            )


def _gloo_finds(text: str, known: list[str]) -> bool:
    return all(name.strip() in known for name in text.split(","))


def _nccl_finds(text: str, known: list[str]) -> bool:
    """`eth` any that begins so, `=eth0` exactly it, `^docker,lo` anything but; one that is there will do."""
    match = re.match(r"(\^?)(=?)(.*)", text)
    assert match is not None
    is_without, is_exact, names = match[1], match[2], [name.strip() for name in match[3].split(",")]

    def is_named(interface: str) -> bool:
        return any(interface == name if is_exact else interface.startswith(name) for name in names)

    return any(is_named(interface) is not bool(is_without) for interface in known)
