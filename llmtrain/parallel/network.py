"""Network interfaces of this host, and the choice of one for each group of ranks.

gloo reads GLOO_SOCKET_IFNAME when a group is created and keeps that interface, so every group can have its own
interface. NCCL, by its source (bootstrap.cc), reads NCCL_SOCKET_IFNAME once per process, so all its groups share one
choice. NCCL's behavior has not been tested on GPUs.
"""

from __future__ import annotations

import ipaddress
import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from llmtrain.config import ParallelSection
from llmtrain.errors import RecipeError, TrainingError
from llmtrain.files import BOOT_ID

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""Linux's ioctl request for the IPv4 address of an interface (netdevice(7))."""
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux's setting for the first and last port that it gives to programs that ask for no particular port. gloo and NCCL
are such programs (pytorch/gloo#54, NVIDIA/nccl#388), so this setting alone determines the ports on which ranks listen."""
PORTS_TO_TRY = 256
"""Number of ports that are tried: at each end of the range, where each rank of a node briefly needs up to two, and for
`unused_port`."""
LOCAL_PORTS = 10000, 32768
"""First port for a server on loopback, and the port after the last one if the host's range is not known."""
NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Networks:
    """Names of this host's interfaces, by the traffic that they carry. None leaves the choice to the backend."""

    replica: str | None = None
    """Traffic between replicas and among all ranks."""
    shard: str | None = None
    """Traffic within a replica."""

    @classmethod
    def from_recipe(cls, parallel: ParallelSection) -> Networks:
        """Return the interfaces that the recipe names. A key may list several names, of which the first that this host
        has is used. Raises RecipeError if the host has none of them, or none of the names in GLOO_SOCKET_IFNAME."""
        if os.environ.get(GLOO):
            _first_here(os.environ[GLOO], f"{GLOO} in the environment")
        return cls(
            _first_here(parallel.replica_network, "parallel.replica_network"),
            _first_here(parallel.shard_network, "parallel.shard_network"),
        )

    def with_default_route(self, *peers: str) -> Networks:
        """Return a copy in which each missing interface is replaced by the one through which this host reaches the first
        reachable one of `peers`, addresses or host names.

        gloo itself would use the interface to which this host's own name resolves, which is often loopback. If
        GLOO_SOCKET_IFNAME is set, missing interfaces stay None.
        """
        routes = () if os.environ.get(GLOO) else (interface_of(address_towards(peer)) for peer in peers)
        default = next((interface for interface in routes if interface), None)
        return Networks(self.replica or default, self.shard or default)

    def set_nccl_interface(self, replicas_use_nccl: bool) -> None:
        """Set NCCL_SOCKET_IFNAME to one interface for all of NCCL's groups, if one is given. Otherwise NCCL decides.

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
    # Not by `address_of`, which returns only the first address of an interface.
    return next(
        (
            name
            for name, found in sorted(psutil.net_if_addrs().items())
            if any((one.family, one.address) == (socket.AF_INET, address) for one in found)
        ),
        None,
    )


def is_loopback(address: str) -> bool:
    """Return whether an address reaches only this host."""
    return ipaddress.ip_address(address).is_loopback


def port_range() -> tuple[int, int] | None:
    """Return the first and the last port that this host gives to listeners that ask for no particular port, or None if
    the system does not report them."""
    try:
        first, last = PORT_RANGE.read_text(encoding="utf-8").split()
    except OSError:
        return None
    return int(first), int(last)


def format_port_range() -> str:
    """Return this host's port range as text for users, such as `32768-60999`."""
    found = port_range()
    return "above 1024" if found is None else f"{found[0]}-{found[1]}"


def check_localhost() -> None:
    """Raise TrainingError unless the name localhost resolves to a loopback address, through which the ranks of one
    machine reach each other. Otherwise torch would try to connect for minutes."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo("localhost", None)}
    except OSError as error:
        problem = f"has no address ({error.strerror})"
    else:
        if any(map(is_loopback, found)):
            return
        problem = f"is {', '.join(sorted(found))}"
    raise TrainingError(
        f"the name localhost {problem} on this machine, so its ranks can't reach each other; add the line "
        "`127.0.0.1 localhost` to /etc/hosts"
    )


def unused_port() -> int:
    """Return a port of loopback that is free now, for a server that starts later.

    The port lies below this host's range, so the kernel does not give it to another process before then.
    """
    first, default_end = LOCAL_PORTS
    known = port_range()
    end = max(default_end if known is None else known[0], first + PORTS_TO_TRY)
    for port in random.SystemRandom().sample(range(first, end), PORTS_TO_TRY):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise TrainingError(f"none of {PORTS_TO_TRY} ports from {first} to {end - 1} is free on loopback")


def network_stack() -> str:
    """Return an identifier that is equal for two processes if and only if they have the same network interfaces."""
    try:
        return f"{BOOT_ID.read_text(encoding='utf-8').strip()} {os.stat(NETWORK_NAMESPACE).st_ino}"
    except OSError:
        return socket.gethostname()


def listen_at_both_ends(address: str, backlog: int) -> list[socket.socket]:
    """Return two sockets that listen on the first and on the last free port of this host's range, or one socket if the
    range is not known.

    A firewall that opens only a part of the range, or another range, blocks one of these ports. A single port chosen by
    the kernel could lie in the open part.
    """
    found = port_range()
    if found is None:
        return [_listen_on_first(address, [0], backlog)]
    first, last = found
    several = min(PORTS_TO_TRY, last - first + 1)
    ends = range(first, first + several), range(last, last - several, -1)
    with ExitStack() as if_one_fails:
        listeners = [if_one_fails.enter_context(_listen_on_first(address, [*ports, 0], backlog)) for ports in ends]
        if_one_fails.pop_all()
    return listeners


def _listen_on_first(address: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """Return a socket that listens on the first free one of `ports`. 0 stands for a port that the kernel chooses."""
    with ExitStack() as if_it_fails:
        listener = if_it_fails.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        for port in ports[:-1]:
            with suppress(OSError):
                listener.bind((address, port))
                break
        else:
            listener.bind((address, ports[-1]))
        listener.listen(backlog)
        if_it_fails.pop_all()
    return listener


@contextmanager
def using_interface(interface: str | None) -> Iterator[None]:
    """Make gloo groups that are created within the context use this interface. None stands for `given_interface`, or
    for gloo's own choice if the variable is not set."""
    before = os.environ.get(GLOO)
    chosen = given_interface() if interface is None else interface
    if chosen is not None:
        os.environ[GLOO] = chosen
    try:
        yield
    finally:
        if chosen is not None:
            os.environ.pop(GLOO)
        if before is not None:
            os.environ[GLOO] = before


def given_interface() -> str | None:
    """Return the first interface in GLOO_SOCKET_IFNAME that this host has, or its first name if the host has none of them. Return
    None if the variable is not set. gloo itself would use all of its names, and fail where one is missing."""
    names = [part.strip() for part in os.environ.get(GLOO, "").split(",") if part.strip()]
    here = interfaces() if len(names) > 1 else []
    return next((name for name in names if name in here), names[0] if names else None)


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
