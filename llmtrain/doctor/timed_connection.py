"""TCP connection with one deadline for all of its messages."""

from __future__ import annotations

import socket
import time


class TimedConnection:
    """Connection that raises TimeoutError once `timeout_seconds` have passed since it began to connect, however many messages it
    has carried by then. A socket's own timeout starts anew with each message, so it does not limit the time on a slow link."""

    def __init__(self, mine: str, server: tuple[str, int], timeout_seconds: float):
        self._deadline = time.monotonic() + timeout_seconds
        self.socket = socket.create_connection(server, timeout_seconds, source_address=(mine, 0))

    def sendall(self, data: bytes) -> None:
        """Send all of `data`."""
        self._in_time().sendall(data)

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; no bytes at the end of the other side's data."""
        return self._in_time().recv(size)

    def _in_time(self) -> socket.socket:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(left)
        return self.socket
