"""Speed of the network: links between hosts over plain TCP, then the mesh's collectives on both axes.

Links are measured at the addresses gloo uses: reachability, latency, rates and clock skew. The host with the higher
index measures a link by connecting to the other host's server. Measurements run in the rounds of a tournament, so that
no two of them share a network card.
"""

from __future__ import annotations

import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.filesize import decimal

from llmtrain.doctor.finding import Finding, ok, problem, warning
from llmtrain.doctor.timed_connection import TimedConnection
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.connections import FAR_SECONDS
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.network import format_port_range
from llmtrain.plan.network_time import STREAMS

PINGS = 15
SMALLEST, LARGEST = 2**16, 2**30
"""Bytes of the first and of the largest transfer. An all-reduce has SMALLEST fp32 values at first."""
LARGEST_VALUES = 2**25
"""Values of the largest all-reduce. They suffice for gloo's largest hops with up to 8 replicas and 4 connections."""
LONG_ENOUGH, COLLECTIVE_LONG_ENOUGH = 0.2, 0.3
"""Minimum seconds that a transfer or an all-reduce must take for its rate to count. A shorter one is repeated with twice the
bytes."""
ROUND_TRIPS = 10
"""Minimum round trips that a transfer must take, too. One is subtracted; TCP's window may still grow during one or two more."""
HOPS_COVERED = 3
"""An all-reduce must also take this many times the round trips of its hops. Its bytes then travel during nearly all of these round
trips but the first, which is subtracted. On emulated hosts 100 ms apart (one way), 10 and 100 Mbit/s came out 5 to 20 % too low."""
LONGEST_TRANSFER, LONGEST_COLLECTIVE = 1 / 20, 1 / 4
"""Upper bounds on these minimum times, as fractions of the timeout, because other ranks wait. The last transfer can take twice as
long, and all transfers together four times as long."""
CHUNK = bytes(2**16)
SECRET_BYTES = 16

Connection = socket.socket | TimedConnection


@dataclass(frozen=True)
class Link:
    """Measurement of the link between two hosts (indices), or the error that prevented it. Host `there` measures the link by
    connecting to host `here`."""

    here: int
    there: int
    milliseconds: float = 0.0
    """Median round-trip time."""
    sent: float = 0.0
    """Bytes per second from `there` to `here`."""
    received: float = 0.0
    """Bytes per second from `here` to `there`."""
    skew: float = 0.0
    """Seconds by which the clock of `here` is ahead of that of `there`."""
    error: str = ""


class LinkServer:
    """TCP server that answers pings and transfers from clients that know the secret, until it is closed."""

    def __init__(self, address: str, secret: bytes, timeout_seconds: float):
        self._secret, self._timeout = secret, timeout_seconds
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(self._timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(connection, SECRET_BYTES), self._secret):
                return
            while True:
                what, size = struct.unpack("!cQ", _receive(connection, 9))
                if what == b"d":
                    _send_zeros(connection, min(size, LARGEST))
                else:
                    _drop(connection, min(size, LARGEST))
                    connection.sendall(struct.pack("!d", time.time()))


def measure_link(
    here: int, there: int, mine: str, server: tuple[str, int], secret: bytes, timeout_seconds: float
) -> Link:
    """Measure the link from this host (`there`, at address `mine`) to the server of host `here`, in at most `timeout_seconds`.

    Network errors are returned in `error`, not raised.
    """
    try:
        connection = TimedConnection(mine, server, timeout_seconds)
        with connection.socket:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            pings = [_ping(connection) for _ in range(PINGS)]
            round_trip = median(seconds for seconds, _ in pings)
            return Link(
                here,
                there,
                milliseconds=1000 * round_trip,
                sent=_rate(lambda size: _upload(connection, size), round_trip, timeout_seconds),
                received=_rate(lambda size: _download(connection, size), round_trip, timeout_seconds),
                skew=min(pings)[1],  # the shortest round trip gives the best estimate of the skew
            )
    except OSError as error:
        reason = (
            f"no answer in {timeout_seconds:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        )
        return Link(here, there, error=reason)


def tournament(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs (lower, higher) of host indices (circle method).

    Every pair meets in exactly one round, and no host is in two pairs of a round.
    """
    seats = [*range(hosts), *([None] if hosts % 2 else [])]
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure_all(
    me: int | None,
    addresses: Sequence[str],
    secret: bytes,
    timeout_seconds: float,
    exchange: Callable[[str, Any], Sequence[Any]],
) -> list[Link]:
    """Measure all links between hosts and return them on every rank. A collective of all ranks.

    `me` is this host's index, or None on ranks that measure nothing. `exchange(name, value)` returns every host's
    value in the order of `addresses`; all ranks call it the same number of times. It must wait longer than `timeout_seconds`.
    """
    server = LinkServer(addresses[me], secret, timeout_seconds) if me is not None else None
    links: list[Link] = []
    try:
        ports = exchange("address", server.port if server else None)
        for number, pairs in enumerate(tournament(len(addresses))):
            mine = next((here for here, there in pairs if there == me), None)
            link = None
            if me is not None and mine is not None:
                target = (addresses[mine], ports[mine])
                link = asdict(measure_link(mine, me, addresses[me], target, secret, timeout_seconds))
            links += [Link(**found) for found in exchange(f"link in round {number}", link) if found]
    finally:
        if server:
            server.close()
    return sorted(links, key=lambda link: (link.here, link.there))


def _ping(connection: Connection) -> tuple[float, float]:
    """Return (round-trip seconds, seconds by which the other clock was ahead of this one halfway through)."""
    began, clock = time.perf_counter(), time.time()
    other = _upload(connection, 0)
    seconds = time.perf_counter() - began
    return seconds, other - (clock + seconds / 2)


def _rate(transfer: Callable[[int], Any], round_trip: float, timeout_seconds: float) -> float:
    """Return the bytes per second, without the round trip, of the first transfer that is long enough, or of the largest one."""

    def timed(size: int) -> float:
        began = time.perf_counter()
        transfer(size)
        return time.perf_counter() - began

    long_enough = max(LONG_ENOUGH, min(ROUND_TRIPS * round_trip, LONGEST_TRANSFER * timeout_seconds))
    size, seconds = _first_long_enough(timed, LARGEST, long_enough, round_trip)
    return size / seconds


def _first_long_enough(
    measure: Callable[[int], float], largest: int, long_enough: float, round_trip: float
) -> tuple[int, float]:
    """Return (size, seconds without a round trip) of the first measurement that takes long enough, or of the largest one."""
    size = SMALLEST
    while (seconds := measure(size)) < long_enough and size < largest:
        size *= 2
    return size, max(seconds - round_trip, seconds / 2)


def _upload(connection: Connection, size: int) -> float:
    """Send `size` zero bytes and return the other host's clock when it had received them all."""
    connection.sendall(struct.pack("!cQ", b"u", size))
    _send_zeros(connection, size)
    return struct.unpack("!d", _receive(connection, 8))[0]


def _download(connection: Connection, size: int) -> None:
    connection.sendall(struct.pack("!cQ", b"d", size))
    _drop(connection, size)


def _send_zeros(connection: Connection, size: int) -> None:
    for begin in range(0, size, len(CHUNK)):
        connection.sendall(CHUNK[: size - begin])


def _drop(connection: Connection, size: int) -> None:
    for _ in _parts(connection, size):
        pass


def _receive(connection: Connection, size: int) -> bytes:
    return b"".join(_parts(connection, size))


def _parts(connection: Connection, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes in parts as they arrive."""
    while size > 0:
        part = connection.recv(min(size, len(CHUNK)))
        if not part:
            raise ConnectionError("the other host closed the connection")
        size -= len(part)
        yield part


SHOWN = 15
"""Maximum number of links that are listed; if there are more, only the slowest are."""
SLOW = 0.5
"""Fraction of the median rate. A slower link gives a warning, because every synchronization waits for it."""
SKEW_SECONDS = 1.0
SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


def links_between(hosts: Sequence[str], links: Sequence[Link]) -> list[Finding]:
    """Return findings on the reachability of every pair of `hosts` (names), then on latency, bandwidth and clocks."""
    broken, working = [link for link in links if link.error], [link for link in links if not link.error]
    findings = [
        problem(
            f"{hosts[link.there]} can't reach {hosts[link.here]}: {link.error}",
            f"open TCP between the hosts: MASTER_PORT and ports {format_port_range()}; or name the interface that leads there",
        )
        for link in broken
    ]
    if not working:
        return findings
    usual = median(_slower(link) for link in working)
    for link in sorted(working, key=_slower)[:SHOWN]:
        what = (
            f"{hosts[link.there]} to {hosts[link.here]}: {link.milliseconds:.2f} ms round trip, {_per_second(link.sent)} sent, "
            f"{_per_second(link.received)} received"
        )
        if _slower(link) < SLOW * usual:
            advice = f"the median link has {_per_second(usual)}; every synchronization waits for the slowest"
            findings.append(warning(what, advice))
        else:
            findings.append(ok(what))
    if len(working) > SHOWN:
        findings.append(ok(f"{len(working) - SHOWN} more links, none of them slower; median {_per_second(usual)}"))
    return [*findings, *_clocks(hosts, working)]


def not_measurable(hosts: Sequence[str]) -> Finding:
    """Return the finding that the links are not measured, because `hosts` have no known IPv4 address."""
    return warning(
        f"not measured, because no IPv4 address is known for {', '.join(hosts)}",
        "give the hosts IPv4 addresses, and MASTER_ADDR one of them; training over IPv6 alone is not checked",
    )


def round_trip_ms(links: Sequence[Link]) -> float:
    """Return the longest round-trip time of the working links in milliseconds; 0 if no link works."""
    return max((link.milliseconds for link in links if not link.error), default=0.0)


def starts_slowly() -> bool:
    """Return whether this host's TCP starts slowly after every pause, as Linux does by default."""
    return SLOW_START.exists() and SLOW_START.read_text(encoding="utf-8").strip() != "0"


def slow_start(links: Sequence[Link]) -> list[Finding]:
    """Return a warning if hosts are far apart and this host's TCP starts slowly after every pause."""
    longest = round_trip_ms(links)
    if longest < 1000 * FAR_SECONDS or not starts_slowly():
        return []
    return [
        warning(
            f"TCP starts slowly after every pause, so each synchronization begins with round trips of {longest:.0f} ms",
            "sudo sysctl -w net.ipv4.tcp_slow_start_after_idle=0 on every host",
        )
    ]


def _clocks(hosts: Sequence[str], links: Sequence[Link]) -> list[Finding]:
    findings = [
        warning(
            f"the clock of {hosts[link.here]} is {link.skew:+.1f} s off that of {hosts[link.there]}",
            "run an NTP client (chrony) on both; log lines and files of the hosts are hard to order otherwise",
        )
        for link in links
        if abs(link.skew) > SKEW_SECONDS
    ]
    largest = max(abs(link.skew) for link in links)
    return findings or [ok(f"clocks agree to {1000 * largest:.1f} ms")]


def _slower(link: Link) -> float:
    return min(link.sent, link.received)


def _per_second(rate: float) -> str:
    return f"{decimal(int(rate))}/s"


def bench_collectives(
    mesh: Mesh, bytes_a_round: float | None, round_trip: float, timeout_seconds: float
) -> tuple[list[Finding], float | None]:
    """Return findings from all-reduces over the replica axis and the shard axis, and the bytes per second that a rank sends in
    an all-reduce over the replica axis (None for one replica). A collective of all ranks.

    `bytes_a_round` is the bytes that each rank sends per synchronization, or None if unknown. `round_trip` is the longest round
    trip between hosts in seconds, and `timeout_seconds` the mesh's timeout; both are the same on all ranks. Raises TrainingError
    if a collective fails or takes longer than the timeout.
    """
    findings, between_replicas = [], None
    for comms, who in ((mesh.replica_comms, "between replicas"), (mesh.shard_comms, "inside a replica")):
        if comms.size == 1:
            findings.append(ok(f"{comms.axis} axis: one rank, nothing to send {who}"))
            continue
        first_trip = round_trip if comms is mesh.replica_comms else 0.0  # a replica's own ranks are close together
        seconds, sent = _all_reduce(comms, mesh, first_trip, timeout_seconds)
        after = " after its first round trip" if first_trip else ""
        on_several = f" on {len(comms.groups)} connections to each peer" if len(comms.groups) > 1 else ""
        rate = sent / seconds
        if comms is mesh.replica_comms:
            between_replicas = rate
        findings.append(
            ok(
                f"{comms.axis} axis, {who}: all-reduce over {comms.size} ranks sends {decimal(int(sent))} from each in "
                f"{seconds:.3f} s{after}{on_several}, {decimal(int(rate))}/s"
            )
        )
        if comms is mesh.replica_comms and bytes_a_round is not None:
            findings.append(
                ok(
                    f"a synchronization of this model: {decimal(int(bytes_a_round))} from each rank, about "
                    f"{bytes_a_round / rate:.2g} s at that rate, without round trips"
                )
            )
    return findings, between_replicas


def _all_reduce(comms: Comms, mesh: Mesh, round_trip: float, timeout_seconds: float) -> tuple[float, float]:
    """Return (seconds of the slowest rank without a round trip, bytes that each rank sends) of the first all-reduce that takes long
    enough, or of the largest one."""
    covered = HOPS_COVERED * 2 * (comms.size - 1) * round_trip
    long_enough = max(COLLECTIVE_LONG_ENOUGH, min(covered, LONGEST_COLLECTIVE * timeout_seconds))
    # The seconds are the same on all ranks, and so is the decision to continue.
    timed = partial(_timed, comms, mesh)
    values, seconds = _first_long_enough(timed, LARGEST_VALUES, long_enough, round_trip)
    return seconds, 2 * (comms.size - 1) / comms.size * 4 * values


def _timed(comms: Comms, mesh: Mesh, values: int) -> float:
    tensor = torch.zeros(values, device=comms.device)
    # Twice: the first all-reduce opens TCP's window, which the pause before it may have closed, and the ranks meet in it.
    for _ in range(2):
        began = time.perf_counter()
        # As many messages as gloo carries out at once, like the messages of several blocks.
        parts = tensor.chunk(STREAMS * len(comms.groups))
        for pending in [comms.start_all_reduce(part, "measuring") for part in parts]:
            pending.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    seconds = time.perf_counter() - began
    return float(mesh.all_ranks.all_gather(torch.tensor([seconds], dtype=torch.float64), "comparing times").max())
