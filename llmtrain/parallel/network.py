"""Which network cards this host has, and which of them a group of ranks uses.

gloo reads GLOO_SOCKET_IFNAME when a group is made and keeps to that card, so every group can have its own. NCCL, by its
source (bootstrap.cc), reads NCCL_SOCKET_IFNAME once in a process, so all its groups share one choice; not tried on GPUs.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface (netdevice(7))."""


@dataclass(frozen=True)
class Networks:
    """Interfaces of this host, by what they carry; None: the backend decides."""

    replica: str | None = None
    """Traffic between replicas, and between all ranks."""
    shard: str | None = None
    """Traffic within a replica."""

    @classmethod
    def from_recipe(cls, parallel: ParallelSection) -> Networks:
        """Those that the recipe names. Raises RecipeError for a name that is not here, also in gloo's variable."""
        if os.environ.get(GLOO):
            _first_here(os.environ[GLOO], f"{GLOO} in the environment")
        return cls(
            _first_here(parallel.replica_network, "parallel.replica_network"),
            _first_here(parallel.shard_network, "parallel.shard_network"),
        )

    def with_default_route(self, peer: str) -> Networks:
        """With the card that reaches `peer`, an address or name, where nothing is said.

        gloo itself would take the card that this host's own name leads to, and that is often loopback.
        """
        default = None if os.environ.get(GLOO) else interface_of(address_towards(peer))
        return Networks(self.replica or default, self.shard or default)

    def set_nccl_interface(self, replicas_use_nccl: bool) -> None:
        """Set NCCL_SOCKET_IFNAME to NCCL's one card, if a name is given; else NCCL decides.

        Between replicas where they use NCCL: a replica within a node needs no network card.
        """
        name = (self.replica if replicas_use_nccl else None) or self.shard
        if name is not None:
            os.environ[NCCL] = f"={name}"


def interfaces() -> list[str]:
    """Names of this host's network interfaces."""
    return sorted(name for _, name in socket.if_nameindex())


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or the system does not say."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])


def address_towards(peer: str) -> str | None:
    """The IPv4 address from which this host would reach `peer`; None if there is no way. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect((peer, 9))
            return unsent.getsockname()[0]
    except OSError:
        return None


def interface_of(address: str | None) -> str | None:
    """The interface that has this address; None for loopback and for an address that none has."""
    if address is None or is_loopback(address):
        return None
    return next((name for name in interfaces() if address_of(name) == address), None)


def is_loopback(address: str) -> bool:
    """Whether an address leads no further than this host."""
    return ipaddress.ip_address(address).is_loopback


@contextmanager
def using_interface(interface: str | None) -> Iterator[None]:
    """Groups that are made within use this card; None: what the environment says, or gloo finds."""
    before = os.environ.get(GLOO)
    if interface is not None:
        os.environ[GLOO] = interface
    try:
        yield
    finally:
        if interface is not None:
            os.environ.pop(GLOO)
        if before is not None:
            os.environ[GLOO] = before


def _first_here(names: str | None, key: str) -> str | None:
    if names is None:
        return None
    here = interfaces()
    found = next((name for name in (part.strip() for part in names.split(",")) if name in here), None)
    if found is None:
        raise RecipeError(
            f"{key} is {names}, but {socket.gethostname()} has no such network interface, only {', '.join(here)}; "
            "give one of them, or several with commas where hosts differ: the first that a host has is used"
        )
    return found
