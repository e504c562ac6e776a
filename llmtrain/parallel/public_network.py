"""Messages that cross a public network unencrypted: neither gloo nor NCCL encrypts, and neither authenticates a peer."""

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
"""Networks that no router of the internet forwards to. `ipaddress.is_private` also counts networks of documentation and
of benchmarks, which a host on a public network could have by mistake."""
VPN_INTERFACES = ("wg", "tun", "tailscale")
IP_IN_IP = "tunl"
"""Linux's IP-in-IP tunnels (`tunl0`), which do not encrypt."""


@dataclass(frozen=True)
class NodeAddress:
    """Interface and address that a rank uses, and where the rank is."""

    node: str
    host: str
    interface: str
    address: str

    @property
    def needs_encryption(self) -> bool:
        """Return whether messages from here cross a public network, and no tunnel encrypts them."""
        return is_public(self.address) and not is_vpn(self.interface)

    def __str__(self) -> str:
        return f"{self.address} ({self.interface} of {self.host})"


def is_public(address: str) -> bool:
    """Return whether the internet routes to an address."""
    ip = ipaddress.ip_address(address)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return not any(ip in network for network in PRIVATE_NETWORKS if network.version == ip.version)


def is_vpn(interface: str) -> bool:
    """Return whether an interface's name is that of WireGuard, Tailscale or another encrypting tunnel."""
    return interface.startswith(VPN_INTERFACES) and not interface.startswith(IP_IN_IP)


def find_unencrypted(addresses: Sequence[NodeAddress | None]) -> str | None:
    """Return a message that names two addresses on different nodes between which a public network is crossed unencrypted,
    or None. Unknown addresses are None."""
    known = [address for address in addresses if address is not None]
    for one in known:
        for other in known if one.needs_encryption else ():
            if other.node != one.node and other.address != one.address:
                return f"messages between {one} and {other} cross a public network unencrypted"
    return None


ADVICE = "join the hosts by a VPN (launch/two_sites.md), or set parallel.allow_unencrypted=true if that network is safe"
