"""Selects the network interface for gloo and NCCL: the one with the route to the master.

By default gloo resolves its own hostname and NCCL takes the first interface, which is often wrong on machines with
several. A name in a manifest (eth0) is wrong on other clusters.
"""

import ipaddress
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from llmtrain.core.logs import log
from llmtrain.distributed.platform_env import NAMES, is_loopback

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
INFINIBAND = Path("/sys/class/infiniband")
IPV6_ADDRESSES = Path("/proc/net/if_inet6")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def interface_to(host: str) -> str | None:
    """The interface through which the kernel would reach host; None if unknown."""
    try:
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in addresses:
        local = _source_address(family, address, kind, protocol)
        if local is None:
            continue
        if local.is_loopback:
            if "lo" in _names():
                return "lo"
            return None
        interface = interface_of(str(local))
        if interface is not None:
            return interface
    return None


def _source_address(family: int, remote: Any, kind: int = socket.SOCK_DGRAM, protocol: int = 0) -> _Address | None:
    """The address of this machine from which the kernel would send to a remote one; None without a route."""
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(remote)  # UDP: looks up the route, sends nothing
            return ipaddress.ip_address(_without_zone(probe.getsockname()[0]))
    except OSError:
        return None


def _without_zone(address: str) -> str:
    """fe80::1%eth0 without the name of the interface."""
    return address.partition("%")[0]


def reachable_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """The address at which other machines reach this one: POD_IP if set, else the source address of the default route.
    None where there is only loopback."""
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    for family, remote in ((socket.AF_INET, "198.51.100.1"), (socket.AF_INET6, "2001:db8::1")):  # reserved for examples
        local = _source_address(family, (remote, 9))
        if local is not None and not local.is_loopback:
            return str(local)
    for _, address in _interface_addresses():
        if not address.is_loopback and not address.is_link_local:
            return str(address)
    return None


def interface_of(address: str | None) -> str | None:
    """The interface that has an address."""
    for name, known in _interface_addresses():
        if str(known) == address:
            return name
    return None


def hostname_is_loopback() -> bool:
    """Whether the host name of this machine resolves to a loopback address (Debian: 127.0.1.1)."""
    try:
        rows = socket.getaddrinfo(socket.getfqdn(), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    addresses = [_without_zone(str(address[0])) for *_, address in rows]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def has_infiniband() -> bool:
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def setup_network(master_addr: str | None = None, environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the variables of gloo and NCCL that are not set yet, and return them. `master_addr` defaults to the one in
    the environment, else to this machine."""
    if master_addr is None:
        master_addr = _master_of(environ)
    interface = interface_to(master_addr)
    reason = f"route to {master_addr}"
    if interface == "lo" and not is_loopback(master_addr):
        # The name of this machine often resolves to 127.0.1.1, which other nodes cannot reach.
        interface = interface_of(reachable_address(environ))
        reason = "route to the other nodes"
    rows = (
        ("GLOO_SOCKET_IFNAME", interface, reason),
        ("NCCL_SOCKET_IFNAME", interface, reason),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "a failed collective ends the process instead of hanging"),
        ("NCCL_DEBUG", "WARN", "NCCL logs its errors"),
        ("NCCL_IB_DISABLE", None if has_infiniband() else "1", "no InfiniBand device"),
    )
    variables: dict[str, str] = {}
    for name, value, why in rows:
        if name in environ:
            text = f"{name}={environ[name]} is already set"
        elif value is None:
            text = f"{name} is not set: the library chooses"
        else:
            environ[name] = variables[name] = value
            text = f"{name}={value}: {why}"
        log("DDP", text, logging.DEBUG)
    return variables


def _master_of(environ: Mapping[str, str]) -> str:
    for name in NAMES["master_addr"]:
        address = environ.get(name, "").strip()
        if address:
            return address
    return "127.0.0.1"


def _names() -> list[str]:
    try:
        return [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []


def _interface_addresses() -> Iterator[tuple[str, _Address]]:
    try:
        import fcntl
    except ImportError:  # not on this operating system
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in _names():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            yield name, ipaddress.IPv4Address(answer[20:24])
    try:
        lines = IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        address, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(address))
