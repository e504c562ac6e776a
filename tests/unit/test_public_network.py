"""Addresses and interfaces that need encryption, ports at which ranks listen, and interfaces chosen by route."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from llmtrain.errors import TrainingError
from llmtrain.parallel import network
from llmtrain.parallel.network import Networks, format_port_range, listen_at_both_ends, port_range, unused_port
from llmtrain.parallel.public_network import NodeAddress, find_unencrypted, is_public, is_vpn


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("203.0.113.7", True),  # for documentation: no router forwards to it, but no private network has it either
        ("9.255.255.255", True),
        ("10.0.0.0", False),
        ("10.255.255.255", False),
        ("11.0.0.0", True),
        ("172.15.255.255", True),
        ("172.16.0.0", False),
        ("172.31.255.255", False),
        ("172.32.0.0", True),
        ("192.167.255.255", True),
        ("192.168.0.1", False),
        ("192.169.0.0", True),
        ("127.0.1.1", False),
        ("169.254.1.1", False),
        ("100.63.255.255", True),
        ("100.64.0.1", False),
        ("100.127.255.255", False),
        ("100.128.0.0", True),
        ("2a00:1450::1", True),
        ("fd12:3456::1", False),
        ("fe80::1", False),
        ("::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
    ],
)
def test_an_address_is_public_unless_it_is_in_a_private_range(address: str, public: bool):
    assert is_public(address) == public


def test_interfaces_of_tunnels_are_known_by_their_names():
    encrypting = ["wg0", "wg-llmtrain", "tun0", "tailscale0"]
    assert [name for name in [*encrypting, "eth0", "tunl0", "lo", "mywg0"] if is_vpn(name)] == encrypting


def at(node: str, address: str, interface: str = "eth0") -> NodeAddress:
    return NodeAddress(node, f"host-{node}", interface, address)


def test_the_two_ends_of_a_public_network_are_named():
    private, public, other = at("a", "10.0.0.1"), at("b", "198.51.100.2"), at("c", "203.0.113.3")
    named = "messages between 198.51.100.2 (eth0 of host-b) and {} cross a public network unencrypted"
    assert find_unencrypted([None, public, other]) == named.format("203.0.113.3 (eth0 of host-c)")
    assert find_unencrypted([private, public]) == named.format("10.0.0.1 (eth0 of host-a)")


def test_nothing_is_named_within_a_node_a_private_network_or_a_tunnel():
    public = at("a", "203.0.113.1")
    assert find_unencrypted([]) is None
    assert find_unencrypted([at("a", "10.0.0.1"), at("b", "192.168.0.1")]) is None
    assert find_unencrypted([public, at("a", "203.0.113.2"), None]) is None
    assert find_unencrypted([public, at("b", "203.0.113.1")]) is None, "two launchers on one host"
    assert find_unencrypted([at("a", "203.0.113.1", "wg0"), at("b", "203.0.113.2", "wg0")]) is None


def ports_of(listeners: list[socket.socket]) -> list[int]:
    return [listener.getsockname()[1] for listener in listeners]


def test_ports_at_both_ends_of_the_range_are_tried_and_then_any(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = tmp_path / "range"
    monkeypatch.setattr(network, "PORT_RANGE", given)
    assert (port_range(), format_port_range()) == (None, "above 1024")
    [anywhere] = listen_at_both_ends("127.0.0.1", 1)
    first = anywhere.getsockname()[1]
    given.write_text(f"{first}\t{first + 20}\n")
    assert (port_range(), format_port_range()) == ((first, first + 20), f"{first}-{first + 20}")
    opened = [anywhere, *listen_at_both_ends("127.0.0.1", 1)]
    try:
        low, high = ports_of(opened[1:])
        assert first < low < first + 10 < high <= first + 20, "the first port is taken"
        socket.create_connection(("127.0.0.1", high), 5).close()
        given.write_text(f"{first} {first}\n")
        opened += listen_at_both_ends("127.0.0.1", 1)
        assert len(set(ports_of(opened))) == 5, "the only port is taken, so others are used"
    finally:
        for listener in opened:
            listener.close()


@pytest.mark.parametrize("given", ["", "20000 20010"], ids=["one listener", "one at each end"])
@pytest.mark.parametrize("fails_at", ["bind", "listen"])
def test_no_socket_stays_open_if_listening_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, fails_at: str
):
    opened = []

    class Listener(socket.socket):
        def __init__(self, *args: int):
            super().__init__(*args)
            opened.append(self)

        def _fail_if_last(self) -> None:
            if len(opened) == (2 if given else 1):
                raise OSError(errno.EADDRNOTAVAIL, "no such address here")

        def bind(self, address: tuple[str, int]) -> None:
            if fails_at == "bind":
                self._fail_if_last()

        def listen(self, backlog: int) -> None:
            self._fail_if_last()

    monkeypatch.setattr(network, "PORT_RANGE", tmp_path / "range")
    if given:
        (tmp_path / "range").write_text(given)
    monkeypatch.setattr(network.socket, "socket", Listener)
    with pytest.raises(OSError, match="no such address here"):
        listen_at_both_ends("192.0.2.1", 1)
    assert [listener.fileno() for listener in opened] == ([-1, -1] if given else [-1])


def test_an_unused_port_is_one_that_the_kernel_gives_to_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = tmp_path / "range"
    given.write_text("20000 60999\n")
    monkeypatch.setattr(network, "PORT_RANGE", given)
    ports = [unused_port() for _ in range(20)]
    assert all(10000 <= port < 20000 for port in ports) and len(set(ports)) > 10
    given.write_text("1024 60999\n")
    monkeypatch.setattr(network, "PORTS_TO_TRY", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        [port] = ports_of([taken])
        monkeypatch.setattr(network, "LOCAL_PORTS", (port, port + 1))
        with pytest.raises(TrainingError, match=f"none of 1 ports from {port} to {port} is free"):
            unused_port()


def test_the_first_peer_to_which_there_is_a_route_chooses_the_interface(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(network.GLOO, raising=False)
    monkeypatch.setattr(network, "address_towards", {"here": "192.0.2.1", "there": "192.0.2.9"}.get)
    monkeypatch.setattr(network, "interface_of", {"192.0.2.1": "eth0", "192.0.2.9": "eth9"}.get)
    assert Networks().with_default_route("nowhere", "here", "there") == Networks("eth0", "eth0")
    assert Networks().with_default_route("nowhere") == Networks()
