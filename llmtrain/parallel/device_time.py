"""Time on the device: how long its current stream takes for a section of code, and when the stream reaches a point.

On a GPU, the host only enqueues work. With NCCL, `wait` returns at once and the stream waits. With gloo, the host waits, but the
stream may still be busy with earlier work. A host clock therefore shows too little with NCCL, and too much with gloo. Two events
in the stream show the right time with both. They are read once the stream has passed them, so the host never waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from llmtrain.trace import Clock, Mark, host_mark
from llmtrain.turns import in_own_turns, own_time

MAX_PENDING = 1024
"""Maximum number of a timer's sections that the stream has not completed. Beyond it, the host waits for the oldest one.
CUDA itself lets the host run ahead by about as many kernels."""


class DeviceTimer:
    """Running total of the seconds that timed code takes, measured on the calling thread for a CPU and in the current
    stream for a GPU.

    A stream's time for a section begins when the stream has done all earlier work, and ends when it has done the work of
    the section and the host has left the section. If the section waits for a message, this is the time that the stream
    stands still for it, whether the stream itself waits or the host does.
    """

    def __init__(self, device: torch.device | None = None):
        """Measure on `device`, or by the host's clock if it is None or a CPU."""
        self._on_gpu = device is not None and device.type == "cuda"
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    @property
    def seconds(self) -> float:
        """Total of all sections that the device has completed. Reading it does not wait for the others."""
        self._read_completed()
        return self._seconds

    def load(self, seconds: float) -> None:
        """Continue from the total of a checkpoint. Sections that are still pending are dropped."""
        self._seconds = seconds
        self._pending.clear()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time of the enclosed code, which must not change which stream is current. Turns of other replicas in
        this process do not count."""
        if not self._on_gpu:
            before = own_time()
            yield
            self._seconds += own_time() - before
            return
        started: torch.cuda.Event | None = None

        def begin() -> None:
            nonlocal started
            started = self._record()

        def end() -> None:
            self._pending.append((started, self._record()))
            if len(self._pending) > MAX_PENDING:
                self._pending[0][1].synchronize()  # does not idle the device: MAX_PENDING sections follow this one
            self._read_completed()

        with in_own_turns(begin, end):
            yield

    def _record(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read_completed(self) -> None:
        while self._pending and self._pending[0][1].query():
            start, end = self._pending.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
            self._spare += start, end


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which `open_trace` records this device's timeline."""
    return StreamClock() if device.type == "cuda" else host_mark


class StreamClock:
    """Clock of a GPU. A mark is a point in the current stream, whose time is known once the stream has passed it."""

    def __init__(self):
        self._origin: torch.cuda.Event | None = None
        self._origin_time = 0.0
        """Unix time of the origin, in seconds."""

    def __call__(self) -> Mark:
        """Return a mark at the end of the work that has been enqueued in the current stream."""
        if self._origin is None:
            self._set_origin()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return lambda: self._origin_time + self._origin.elapsed_time(event) / 1e3 if event.query() else None

    def _set_origin(self) -> None:
        """Read the clocks of the host and the device at the same moment. The event is in a new stream, so the host does
        not wait for other work."""
        origin = torch.cuda.Event(enable_timing=True)
        origin.record(torch.cuda.Stream())
        origin.synchronize()
        self._origin, self._origin_time = origin, time.time()
