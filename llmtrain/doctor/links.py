"""Between hosts, over plain TCP at the addresses gloo uses: who reaches whom, how fast, and whose clock is off.

A link is measured by the host with the higher index, which connects to the other's server. Each measures one link at
a time: rounds of a tournament, so that no two measurements share a card.
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
from statistics import median
from typing import Any

PINGS = 15
SMALLEST, LARGEST = 2**16, 2**26
"""Bytes of the first and of the largest transfer."""
LONG_ENOUGH = 0.2
"""Seconds of a transfer whose rate counts; shorter ones are repeated with twice the bytes."""
CHUNK = bytes(2**16)
SECRET_BYTES = 16


@dataclass(frozen=True)
class Link:
    """What host `there` measured to host `here` (indices), or why it could not."""

    here: int
    there: int
    milliseconds: float = 0.0
    """A round trip, median."""
    sent: float = 0.0
    """Bytes a second from `there` to `here`."""
    received: float = 0.0
    """Bytes a second from `here` to `there`."""
    skew: float = 0.0
    """Seconds that the clock of `here` is ahead."""
    error: str = ""


class LinkServer:
    """Answers pings and transfers on `address` to those who know the secret, until it is closed."""

    def __init__(self, address: str, secret: bytes, timeout_seconds: float):
        self._secret, self._timeout = secret, timeout_seconds
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more connections."""
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


def measure(here: int, there: int, mine: str, server: tuple[str, int], secret: bytes, timeout_seconds: float) -> Link:
    """The link from this host (`there`, at address `mine`) to the server of host `here`. Never raises for a broken one."""
    try:
        with socket.create_connection(server, timeout_seconds, source_address=(mine, 0)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(secret)
            pings = [_ping(connection) for _ in range(PINGS)]
            return Link(
                here,
                there,
                milliseconds=1000 * median(seconds for seconds, _ in pings),
                sent=_rate(lambda size: _upload(connection, size)),
                received=_rate(lambda size: _download(connection, size)),
                skew=min(pings)[1],  # the quickest round trip says most of the clocks
            )
    except OSError as error:
        reason = (
            f"no answer in {timeout_seconds:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        )
        return Link(here, there, error=reason)


def tournament(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which every pair (lower, higher) meets once and nobody is in two pairs of a round (circle method)."""
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
    """All links between hosts, on every rank. `me` is this host's index, None on ranks that only listen.

    `exchange(name, value)` gives every host's value in the order of `addresses`; all ranks call it equally often.
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
                link = asdict(measure(mine, me, addresses[me], target, secret, timeout_seconds))
            links += [Link(**found) for found in exchange(f"link in round {number}", link) if found]
    finally:
        if server:
            server.close()
    return sorted(links, key=lambda link: (link.here, link.there))


def _ping(connection: socket.socket) -> tuple[float, float]:
    """(seconds there and back, how far the other clock is ahead of ours halfway)."""
    began, clock = time.perf_counter(), time.time()
    other = _upload(connection, 0)
    seconds = time.perf_counter() - began
    return seconds, other - (clock + seconds / 2)


def _rate(transfer: Callable[[int], Any]) -> float:
    """Bytes a second of the first transfer that takes long enough."""
    size = SMALLEST
    while True:
        began = time.perf_counter()
        transfer(size)
        seconds = time.perf_counter() - began
        if seconds >= LONG_ENOUGH or size >= LARGEST:
            return size / seconds
        size *= 2


def _upload(connection: socket.socket, size: int) -> float:
    """Send zeros; the other's clock when it had them all."""
    connection.sendall(struct.pack("!cQ", b"u", size))
    _send_zeros(connection, size)
    return struct.unpack("!d", _receive(connection, 8))[0]


def _download(connection: socket.socket, size: int) -> None:
    connection.sendall(struct.pack("!cQ", b"d", size))
    _drop(connection, size)


def _send_zeros(connection: socket.socket, size: int) -> None:
    for begin in range(0, size, len(CHUNK)):
        connection.sendall(CHUNK[: size - begin])


def _drop(connection: socket.socket, size: int) -> None:
    for _ in _parts(connection, size):
        pass


def _receive(connection: socket.socket, size: int) -> bytes:
    return b"".join(_parts(connection, size))


def _parts(connection: socket.socket, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes, as they come."""
    while size > 0:
        part = connection.recv(min(size, len(CHUNK)))
        if not part:
            raise ConnectionError("the other host closed the connection")
        size -= len(part)
        yield part
