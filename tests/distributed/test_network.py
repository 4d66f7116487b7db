import ipaddress
import logging
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.distributed import network
from llmtrain.distributed.network import (
    has_infiniband,
    hostname_is_loopback,
    interface_to,
    reachable_address,
    setup_network,
)

OTHERS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "NCCL_DEBUG": "WARN"}


def own_address() -> tuple[str, str] | None:
    """An (interface, IPv4 address) of this machine besides loopback, from `ip addr`."""
    try:
        lines = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    rows = [(words[1], words[3].partition("/")[0]) for words in map(str.split, lines.splitlines())]
    return next((row for row in rows if row[0] != "lo"), None)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.77"])
def test_interface_to_loopback(host: str) -> None:
    assert interface_to(host) == "lo"


def test_loopback_over_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    assert interface_to("::1") == "lo"


def test_interface_to_own_address() -> None:
    row = own_address()
    if row is None:
        pytest.skip("no interface but loopback, or no ip command")
    name, address = row
    assert interface_to(address) == name


def test_every_ipv6_interface_is_known() -> None:
    found = dict(network._interface_addresses())
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        assert line.split()[-1] in found


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 70 + ".invalid"])
def test_interface_to_unresolvable_name_is_none(host: str) -> None:
    assert interface_to(host) is None


def test_interface_without_if_nameindex_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[tuple[int, str]]:
        raise OSError("not here")

    monkeypatch.setattr(socket, "if_nameindex", refuse)
    assert interface_to("127.0.0.1") is None


@pytest.fixture
def infiniband(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The directory of InfiniBand devices, which does not exist yet."""
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "infiniband")
    return tmp_path / "infiniband"


def test_setup_network_without_infiniband(infiniband: Path) -> None:
    environ: dict[str, str] = {}
    variables = setup_network("127.0.0.1", environ)
    assert variables == environ
    assert variables == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **OTHERS}
    assert setup_network("127.0.0.1", environ) == {}
    infiniband.mkdir()
    assert not has_infiniband()


def test_infiniband_stays_enabled(infiniband: Path) -> None:
    (infiniband / "mlx5_0").mkdir(parents=True)
    assert has_infiniband()
    assert "NCCL_IB_DISABLE" not in setup_network("127.0.0.1", {})


def test_setup_network_keeps_set_variables(infiniband: Path) -> None:
    assert not infiniband.exists()
    environ = {"GLOO_SOCKET_IFNAME": "mine", "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "0"}
    variables = setup_network("127.0.0.1", environ)
    assert set(variables) == {"NCCL_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_DEBUG"], environ["NCCL_IB_DISABLE"]) == ("mine", "INFO", "0")


def test_unknown_interface_is_not_set(infiniband: Path) -> None:
    assert not infiniband.exists()
    assert setup_network("nobody.invalid", {}) == {"NCCL_IB_DISABLE": "1", **OTHERS}


def test_host_name_on_loopback_selects_reachable_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps the machine's own name to 127.0.1.1, which other nodes cannot reach."""
    monkeypatch.setattr(network, "interface_to", lambda host: "lo" if host in ("box", "localhost") else None)
    rows = [("lo", "127.0.0.1"), ("eth0", "10.1.2.3"), ("eth1", "10.9.9.9")]
    addresses = [(name, ipaddress.ip_address(address)) for name, address in rows]
    monkeypatch.setattr(network, "_interface_addresses", lambda: iter(addresses))
    assert setup_network("box", {"POD_IP": "10.9.9.9"})["GLOO_SOCKET_IFNAME"] == "eth1"
    monkeypatch.setattr(network, "reachable_address", lambda _: "10.1.2.3")
    assert setup_network("box", {})["GLOO_SOCKET_IFNAME"] == "eth0"
    assert setup_network("box", {})["NCCL_SOCKET_IFNAME"] == "eth0"
    monkeypatch.setattr(network, "reachable_address", lambda _: None)
    assert "GLOO_SOCKET_IFNAME" not in setup_network("box", {})
    assert setup_network("localhost", {})["GLOO_SOCKET_IFNAME"] == "lo"


def test_reachable_address_is_not_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    address = reachable_address({})
    assert address is None or not ipaddress.ip_address(address).is_loopback
    assert reachable_address({"POD_IP": "10.0.0.7"}) == "10.0.0.7"
    monkeypatch.setattr(network, "_interface_addresses", lambda: iter(()))
    monkeypatch.setattr(socket, "socket", no_route)
    assert reachable_address({}) is None


def no_route(*_: object) -> None:
    raise OSError("Network is unreachable")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["127.0.1.1"], True),
        (["::1", "127.0.0.1"], True),
        (["127.0.1.1", "10.0.0.7"], False),
        (["fe80::1%eth0"], False),
    ],
)
def test_hostname_is_loopback(monkeypatch: pytest.MonkeyPatch, found: list[str], expected: bool) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (address, 0)) for address in found])
    assert hostname_is_loopback() is expected


def test_setup_network_logs_each_decision(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("llmtrain"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "llmtrain"):
        setup_network("127.0.0.1", {"NCCL_DEBUG": "INFO"})
    assert {record.__dict__["tag"] for record in caplog.records} == {"DDP"}
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert any(message.startswith("GLOO_SOCKET_IFNAME=lo: ") for message in caplog.messages)
    assert any(message.startswith("NCCL_DEBUG=INFO ") for message in caplog.messages)
    assert len({record.message for record in caplog.records}) == 5


def test_rank_discovery_does_not_import_torch() -> None:
    code = "import sys; from llmtrain.distributed import network, process_info, rendezvous\n"
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
