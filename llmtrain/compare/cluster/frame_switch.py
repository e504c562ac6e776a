"""Ethernet switch in user space that delays and loses frames, for kernels without netem. It needs no kernel module.

It runs as a separate process in the namespace of a virtual cluster's bridges, where it replaces one bridge:

    python frame_switch.py '[{"port": "host0net0", "latency_seconds": 0.02, "loss": 0.0, "seed": "1 host0net0"}, ...]'

A frame that arrives from a port's cable is lost with the probability `loss` of that port, drawn from its `seed`.
Otherwise it waits for that port's `latency_seconds`, and leaves by the port of its destination. The kernel does
everything else (TCP, token buckets, counters). Frames keep the kernel's offload header, so that a segmented packet
crosses in one piece. The process prints a line once it forwards frames, answers each line of its input with its
`Counters` as JSON, and ends when its input ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass

ALL_PROTOCOLS = 3
"""Linux's ETH_P_ALL (if_ether.h)."""
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
"""Linux's level and options of packet sockets (packet(7), if_packet.h)."""
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER_BYTES = 64 << 20
"""Buffer of a port in each direction, for bursts while the machine is busy."""
HEADER = 10
"""Bytes of the kernel's offload header (struct virtio_net_hdr) before each frame."""
LARGEST_FRAME = 65_536 + 256
BATCH = 32
"""Frames taken from one port before the others have a turn."""


@dataclass
class Counters:
    """Counts of frames, and times, since the switch started."""

    forwarded: int = 0
    lost: int = 0
    """Frames lost on purpose."""
    dropped: int = 0
    """Frames dropped because the queue to the receiving host was full, as in a switch with a full buffer."""
    late_seconds: float = 0.0
    """Total lateness of the forwarded frames: the time at which each left minus the time at which it was due."""
    latest_seconds: float = 0.0
    """Largest lateness of a forwarded frame."""
    cpu_seconds: float = 0.0
    """CPU time of the process."""


class DelayLine:
    """Queue of the delayed frames from one port, in order of arrival. Each arriving frame is lost with the probability `loss`."""

    def __init__(self, latency_seconds: float, loss: float = 0.0, seed: int | str = 0):
        self.latency_seconds, self.loss = latency_seconds, loss
        self._drawn = random.Random(seed)
        self._frames: deque[tuple[float, bytes]] = deque()

    def push(self, now: float, frame: bytes) -> bool:
        """Take a frame that arrives at `now`. Return whether it is kept."""
        if self.loss and self._drawn.random() < self.loss:
            return False
        self._frames.append((now + self.latency_seconds, frame))
        return True

    @property
    def next_due(self) -> float:
        """Return the time at which the next frame leaves; infinity if none is on its way."""
        return self._frames[0][0] if self._frames else float("inf")

    def pop_due(self, now: float) -> list[tuple[float, bytes]]:
        """Remove the frames that are due by `now`, and return them as pairs (due time, frame)."""
        due = []
        while self._frames and self._frames[0][0] <= now:
            due.append(self._frames.popleft())
        return due


class AddressTable:
    """Table of the port behind which each hardware address was last seen."""

    def __init__(self, ports: int):
        self.ports = ports
        self._seen: dict[bytes, int] = {}

    def learn(self, frame: bytes, port: int) -> None:
        """Record the port from which the sender of a frame (with its offload header) was seen."""
        self._seen[frame[HEADER + 6 : HEADER + 12]] = port

    def ports_for(self, frame: bytes, port: int) -> list[int]:
        """Return the ports by which a frame from a port leaves: its destination's, or all other ports if that is unknown."""
        found = self._seen.get(frame[HEADER : HEADER + 6])
        return [found] if found is not None else [other for other in range(self.ports) if other != port]


class Switch:
    """Switch that forwards frames between ports."""

    def __init__(self, ports: list[dict]):
        self.counters = Counters()
        self._sockets = [_packet_socket(one["port"]) for one in ports]
        self._lines = [DelayLine(one["latency_seconds"], one["loss"], one["seed"]) for one in ports]
        self._table = AddressTable(len(ports))

    def run(self) -> None:
        """Forward frames, and answer each line of the input with the counters, until the input ends."""
        own = {one.fileno(): index for index, one in enumerate(self._sockets)}
        while True:
            wait = min(line.next_due for line in self._lines) - time.monotonic()
            # Not epoll, which waits for whole milliseconds.
            ready, _, _ = select.select([*own, sys.stdin], [], [], None if wait == float("inf") else max(0.0, wait))
            for one in ready:
                if one is sys.stdin:
                    if not sys.stdin.readline():
                        return
                    self._answer()
                else:
                    self._receive(own[one])
            now = time.monotonic()
            for index, line in enumerate(self._lines):
                for due, frame in line.pop_due(now):
                    self._forward(index, due, frame)

    def _receive(self, port: int) -> None:
        receive, line = self._sockets[port].recv, self._lines[port]
        with contextlib.suppress(OSError):  # no frame is left, or the cable has been unplugged
            for _ in range(BATCH):
                frame = receive(LARGEST_FRAME)
                self._table.learn(frame, port)
                if not line.push(time.monotonic(), frame):
                    self.counters.lost += 1

    def _forward(self, port: int, due: float, frame: bytes) -> None:
        counters = self.counters
        for other in self._table.ports_for(frame, port):
            try:
                self._sockets[other].send(frame)
            except OSError:  # no buffers: the token bucket's queue is full
                counters.dropped += 1
        late = time.monotonic() - due
        counters.forwarded += 1
        counters.late_seconds += late
        counters.latest_seconds = max(counters.latest_seconds, late)

    def _answer(self) -> None:
        self.counters.cpu_seconds = time.process_time()
        print(json.dumps(asdict(self.counters)), flush=True)


def _packet_socket(port: str) -> socket.socket:
    """Return a socket for the frames that arrive from a port's cable, and for those that leave by it."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)  # receives nothing until it is bound
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        made.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    made.setblocking(False)
    made.bind((port, ALL_PROTOCOLS))
    return made


def main() -> None:
    """Forward frames between the ports given on the command line. Real-time priority keeps the hosts' processes from
    delaying them."""
    gc.disable()  # no reference cycles arise here, and a collection would traverse all delayed frames
    with contextlib.suppress(PermissionError):  # in a control group without real-time scheduling
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    switch = Switch(json.loads(sys.argv[1]))
    print("forwarding", flush=True)
    switch.run()


if __name__ == "__main__":
    main()
