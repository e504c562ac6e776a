"""Network interfaces of this host, and the choice of one for each group of ranks.

gloo reads GLOO_SOCKET_IFNAME when a group is created and keeps that interface, so every group can have its own.
NCCL, by its source (bootstrap.cc), reads NCCL_SOCKET_IFNAME once per process, so all its groups share one choice.
NCCL's behavior has not been tested on GPUs.
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
"""Linux's ioctl request for the IPv4 address of an interface (netdevice(7))."""


@dataclass(frozen=True)
class Networks:
    """Interfaces of this host, by the traffic that they carry. None leaves the choice to the backend."""

    replica: str | None = None
    """Traffic between replicas and among all ranks."""
    shard: str | None = None
    """Traffic within a replica."""

    @classmethod
    def from_recipe(cls, parallel: ParallelSection) -> Networks:
        """Return the interfaces that the recipe names. A key may give several names, and the first that this host
        has is used. Raises RecipeError if the host has none of them, or none of those in GLOO_SOCKET_IFNAME."""
        if os.environ.get(GLOO):
            _first_here(os.environ[GLOO], f"{GLOO} in the environment")
        return cls(
            _first_here(parallel.replica_network, "parallel.replica_network"),
            _first_here(parallel.shard_network, "parallel.shard_network"),
        )

    def with_default_route(self, peer: str) -> Networks:
        """Return a copy in which each missing interface is the one that reaches `peer`, an address or a host name.

        gloo itself would use the interface to which this host's own name resolves, which is often loopback. If
        GLOO_SOCKET_IFNAME is set, missing interfaces stay None.
        """
        default = None if os.environ.get(GLOO) else interface_of(address_towards(peer))
        return Networks(self.replica or default, self.shard or default)

    def set_nccl_interface(self, replicas_use_nccl: bool) -> None:
        """Set NCCL_SOCKET_IFNAME to the one interface for NCCL, if one is given. Otherwise NCCL decides.

        If replicas use NCCL, the interface between replicas takes precedence, because a replica within a node needs no
        network.
        """
        name = (self.replica if replicas_use_nccl else None) or self.shard
        if name is not None:
            os.environ[NCCL] = f"={name}"


def interfaces() -> list[str]:
    """Return the sorted names of this host's network interfaces."""
    return sorted(name for _, name in socket.if_nameindex())


def address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None if it has none or the system does not report it."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return None
    return socket.inet_ntoa(answer[20:24])


def address_towards(peer: str) -> str | None:
    """Return the IPv4 address from which this host would reach `peer`, or None if there is no route. Sends nothing
    to `peer`."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
            unsent.connect((peer, 9))
            return unsent.getsockname()[0]
    except OSError:
        return None


def interface_of(address: str | None) -> str | None:
    """Return the interface that has this address, or None for loopback and for an address that no interface has."""
    if address is None or is_loopback(address):
        return None
    return next((name for name in interfaces() if address_of(name) == address), None)


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only this host."""
    return ipaddress.ip_address(address).is_loopback


@contextmanager
def using_interface(interface: str | None) -> Iterator[None]:
    """Make gloo groups that are created within the context use this interface. None keeps the
    environment's choice, or gloo's own."""
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
