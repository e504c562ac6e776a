"""Emulated streams and events. They run nothing, but know when their work would be done, and report to listeners.

The work of a stream takes no time, except for `occupy`. A stream that waits for an event is not done before the event.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

Listener = Callable[..., None]
listeners: list[Listener] = []
"""Functions that are called with what happens and the ids concerned: `stream made`, `event made`, `recorded` (event,
stream), `waits` (stream, event), `host waits` (for a stream, or None for all of them)."""
CYCLES_PER_SECOND = 2e9
_ids = itertools.count(1)


def _tell(what: str, *ids: int | None) -> None:
    for listener in listeners:
        listener(what, *ids)


class HostClock:
    """Clock of the host, in seconds. A wait for a stream takes no real time, because it puts the clock forward."""

    def __init__(self, machine: Callable[[], float] = time.perf_counter):
        self._machine, self._ahead = machine, 0.0

    def __call__(self) -> float:
        return self._machine() + self._ahead

    def advance(self, seconds: float) -> None:
        """Let the host do something else for `seconds`."""
        self._ahead += seconds

    def wait_until(self, moment: float) -> None:
        """Let the host wait until `moment`, unless it has passed."""
        self.advance(max(0.0, moment - self()))


def names_of_streams(device: Callable[[], Any], clock: HostClock) -> dict[str, Any]:
    """Return emulations of `torch.cuda`'s streams and events by name. `device` returns the current device."""
    of_thread = threading.local()
    streams: list[Stream] = []

    class Stream:
        def __init__(self, given: Any = None, priority: int = 0, number: int | None = None, **_: Any):
            self.device = device()
            self.cuda_stream = self.stream_id = next(_ids) if number is None else number
            self.busy_until = 0.0
            streams.append(self)
            _tell("stream made", self.cuda_stream)

        def wait_stream(self, other: Stream) -> None:
            self.wait_event(other.record_event())

        def wait_event(self, event: Event) -> None:
            self.busy_until = max(self.busy_until, event.at)
            _tell("waits", self.cuda_stream, event.number)

        def record_event(self, event: Event | None = None) -> Event:
            event = event or Event()
            event.record(self)
            return event

        def occupy(self, seconds: float) -> None:
            self.busy_until = max(self.busy_until, clock()) + seconds

        def synchronize(self) -> None:
            clock.wait_until(self.busy_until)
            _tell("host waits", self.cuda_stream)

        def query(self) -> bool:
            return self.busy_until <= clock()

        def is_capturing(self) -> bool:
            return False

    class Event:
        def __init__(self, *_: Any, **__: Any):
            self.number, self.at = next(_ids), 0.0
            _tell("event made", self.number)

        def record(self, stream: Stream | None = None) -> None:
            stream = stream or current()
            self.at = max(stream.busy_until, clock())
            _tell("recorded", self.number, stream.cuda_stream)

        def wait(self, stream: Stream | None = None) -> None:
            (stream or current()).wait_event(self)

        def synchronize(self) -> None:
            clock.wait_until(self.at)
            _tell("host waits", None)

        def query(self) -> bool:
            return self.at <= clock()

        def elapsed_time(self, other: Event) -> float:
            if not (self.query() and other.query()):
                raise RuntimeError("CUDA error: device not ready")
            return 1e3 * (other.at - self.at)

    class InStream:
        def __init__(self, stream: Stream | None):
            self.stream = stream

        def __enter__(self) -> None:
            self.before = current()
            of_thread.stream = self.stream or self.before

        def __exit__(self, *_: object) -> None:
            of_thread.stream = self.before

    default = Stream(number=0)

    def current(given: Any = None) -> Stream:
        return getattr(of_thread, "stream", default)

    def wait_for_all(given: Any = None) -> None:
        clock.wait_until(max(stream.busy_until for stream in streams))
        _tell("host waits", None)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: InStream(stream),
        "StreamContext": InStream,
        "current_stream": current,
        "default_stream": lambda given=None: default,
        "synchronize": wait_for_all,
        "is_current_stream_capturing": lambda: False,
        "_sleep": lambda cycles: current().occupy(cycles / CYCLES_PER_SECOND),
    }
