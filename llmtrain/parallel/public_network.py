"""Detection of messages that cross a public network unencrypted. gloo and NCCL neither encrypt nor authenticate peers."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

PRIVATE_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in (
        "10.0.0.0/8",  # these three: RFC 1918
        "172.16.0.0/12",
        "192.168.0.0/16",
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local
        "100.64.0.0/10",  # RFC 6598, shared by carriers and used by Tailscale
        "::1/128",
        "fc00::/7",  # unique local addresses
        "fe80::/10",
    )
)
"""Networks to which internet routers do not forward. `ipaddress.is_private` would also count the ranges reserved for
documentation and benchmarks, which a host on a public network could have by mistake."""
VPN_INTERFACES = ("wg", "tun", "tailscale")
IP_IN_IP = "tunl"
"""Linux's IP-in-IP tunnels (`tunl0`), which do not encrypt."""


@dataclass(frozen=True)
class NodeAddress:
    """Interface and address that a rank uses, and the rank's node and host."""

    node: str
    host: str
    interface: str
    address: str

    @property
    def needs_encryption(self) -> bool:
        """True if messages from this address cross a public network without an encrypting tunnel."""
        return is_public(self.address) and not is_vpn(self.interface)

    def __str__(self) -> str:
        return f"{self.address} ({self.interface} of {self.host})"


def is_public(address: str) -> bool:
    """Return whether an address is routed on the internet."""
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return not any(ip in network for network in PRIVATE_NETWORKS if network.version == ip.version)


def is_vpn(interface: str) -> bool:
    """Return whether an interface's name is that of WireGuard, Tailscale or another encrypting tunnel."""
    return interface.startswith(VPN_INTERFACES) and not interface.startswith(IP_IN_IP)


def find_unencrypted(addresses: Sequence[NodeAddress | None]) -> str | None:
    """Return a message that names two addresses on different nodes, if messages between them cross a public network
    unencrypted; None if no two addresses do. An unknown address is None in `addresses`."""
    known = [address for address in addresses if address is not None]
    for one in known:
        if not one.needs_encryption:
            continue
        for other in known:
            if other.node != one.node and other.address != one.address:
                return f"messages between {one} and {other} cross a public network unencrypted"
    return None


ADVICE = "join the hosts by a VPN (launch/two_sites.md), or set parallel.allow_unencrypted=true if that network is safe"
