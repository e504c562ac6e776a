"""Spans of time on this rank, for timelines: what it did in some steps, and which messages were under way meanwhile.

`open_trace` starts a recording, of which a process has one at most; without one, all else here does nothing. A span is a
line of JSON: kind, name, step, start and end (unix seconds), and bytes for messages. Kinds: `step` (a whole one), `data`,
`gradient` (forward, backward and the optimizer), `exposed` (training stands still for synchronization), `wait` (of it,
for the slowest replica), `delay` (injected) and `message` (between replicas, in the background).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

Kind = Literal["step", "data", "gradient", "exposed", "wait", "delay", "message"]


class Recording:
    """Spans that begin in steps `first` to `last`, written to `path` as they end."""

    def __init__(self, path: Path, first: int, last: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.first, self.last, self.step = first, last, 0
        self._file = path.open("w", buffering=1)
        self._lock = threading.Lock()  # messages end on the backend's threads

    @property
    def is_on(self) -> bool:
        """Whether what begins now is recorded."""
        return self.first <= self.step <= self.last

    def write(self, kind: Kind, name: str, step: int, start: float, **more: float) -> None:
        """A span that ends now."""
        line = json.dumps({"kind": kind, "name": name, "step": step, "start": start, "end": time.time(), **more})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """What is still under way is not recorded."""
        with self._lock:
            self._file.close()


_recording: Recording | None = None


@contextmanager
def open_trace(path: Path, first: int, last: int) -> Iterator[None]:
    """Record steps `first` to `last` to `path` within this context."""
    global _recording
    _recording = Recording(path, first, last)
    try:
        yield
    finally:
        _recording.close()
        _recording = None


@contextmanager
def step_span(step: int) -> Iterator[None]:
    """Step number `step` is done within."""
    if _recording is not None:
        _recording.step = step
    with span("step"):
        yield


@contextmanager
def span(kind: Kind, name: str = "") -> Iterator[None]:
    """What happens within is of this kind."""
    recording = _recording
    if recording is None or not recording.is_on:
        yield
        return
    started, step = time.time(), recording.step
    yield
    recording.write(kind, name, step, started)


def message(name: str, sent: float) -> Callable[[], None] | None:
    """A message of so many bytes begins now; call what is returned when it has arrived, from any thread. None: nobody
    wants to know."""
    recording = _recording
    if recording is None or not recording.is_on:
        return None
    started, step = time.time(), recording.step
    return lambda: recording.write("message", name, step, started, bytes=sent)
