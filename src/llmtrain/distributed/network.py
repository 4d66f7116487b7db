"""Which network interface leads to the master, told to gloo and NCCL before they guess.

Left alone, gloo looks its own hostname up and NCCL takes the first interface: both go wrong on machines with several.
A name written into a manifest (eth0) goes wrong on every other cluster.
"""

import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from llmtrain.distributed.env import NAMES, is_loopback
from llmtrain.logs import log

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
INFINIBAND = Path("/sys/class/infiniband")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_to(host: str) -> str | None:
    """The interface whose address the kernel would use to reach host; None where that cannot be known."""
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # UDP: asks the routing table, sends nothing
                own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        except OSError:
            continue
        if own.is_loopback:
            return "lo" if "lo" in _names() else None
        match = next((name for name, known in _interface_addresses() if known == own), None)
        if match is not None:
            return match
    return None


def reachable_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """The address at which other machines reach this one: POD_IP where that is given, else the one by which packets
    leave it. None where there is no network but loopback."""
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    for family, far in ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")):  # nobody has these
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))
                own = ipaddress.ip_address(probe.getsockname()[0].partition("%")[0])
        except OSError:
            continue  # no way out
        if not own.is_loopback:
            return str(own)
    others = [address for _, address in _interface_addresses() if not address.is_loopback and not address.is_link_local]
    return str(others[0]) if others else None


def interface_of(address: str | None) -> str | None:
    """The interface that has an address."""
    return next((name for name, known in _interface_addresses() if str(known) == address), None)


def own_name_is_loopback() -> bool:
    """Whether what this machine calls itself leads other machines to themselves (Debian: 127.0.1.1)."""
    try:
        rows = socket.getaddrinfo(socket.getfqdn(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(row[4][0]).partition("%")[0]).is_loopback for row in rows)


def has_infiniband() -> bool:
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def setup_network(master_addr: str | None = None, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what gloo and NCCL need and nobody has set; returns what it set. The master is the environment's where none
    is given, else this machine."""
    if master_addr is None:
        given = (environ.get(name, "").strip() for name in NAMES["master_addr"])
        master_addr = next((name for name in given if name), "127.0.0.1")
    interface, reason = interface_to(master_addr), f"leads to {master_addr}"
    if interface == "lo" and not is_loopback(master_addr):
        # This machine's own name often stands for 127.0.1.1, where no other node can come.
        interface, reason = interface_of(reachable_address(environ)), "leads to the other nodes"
    rows = (
        ("GLOO_SOCKET_IFNAME", interface, reason),
        ("NCCL_SOCKET_IFNAME", interface, reason),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a failed collective ends the process instead of hanging"),
        ("NCCL_DEBUG", "WARN", "NCCL says what went wrong"),
        ("NCCL_IB_DISABLE", None if has_infiniband() else "1", "no InfiniBand device here"),
    )
    done: dict[str, str] = {}
    for name, value, why in rows:
        if name in environ:
            text = f"{name}={environ[name]} was set already"
        elif value is None:
            text = f"{name} is left to the library"
        else:
            environ[name] = done[name] = value
            text = f"{name}={value}: {why}"
        log("DDP", text, logging.DEBUG)
    return done


def _names() -> list[str]:
    try:
        return [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []


def _interface_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    try:
        import fcntl
    except ImportError:  # not a system where the question can be asked
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in _names():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            yield name, ipaddress.IPv4Address(answer[20:24])
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        address, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(address))
