"""Time spans on this rank, for timelines: its work in certain steps, and the messages in flight during them.

`open_trace` starts a recording. A process has at most one; without one, the other functions record nothing.
A span is a line of JSON: kind, name, step, start and end (Unix seconds), and bytes for messages. Kinds: `step` (a
full step), `data`, `gradient` (forward, backward and the optimizer), `exposed` (training stands still for
synchronization), `wait` (part of it, for the slowest replica), `delay` (injected) and `message` (between replicas,
in the background).
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
    """Recording of spans that begin in steps `first` to `last`, written to `path` as they end."""

    def __init__(self, path: Path, first: int, last: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.first, self.last, self.step = first, last, 0
        self._file = path.open("w", buffering=1)
        self._lock = threading.Lock()  # messages end on the backend's threads

    @property
    def is_on(self) -> bool:
        """Return whether a span that begins now is recorded."""
        return self.first <= self.step <= self.last

    def write(self, kind: Kind, name: str, step: int, start: float, **more: float) -> None:
        """Write a span that ends now."""
        line = json.dumps({"kind": kind, "name": name, "step": step, "start": start, "end": time.time(), **more})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file. Spans still in flight are not recorded."""
        with self._lock:
            self._file.close()


_recording: Recording | None = None


@contextmanager
def open_trace(path: Path, first: int, last: int) -> Iterator[None]:
    """Record the spans of steps `first` to `last` in the file `path`, within this context."""
    global _recording
    _recording = Recording(path, first, last)
    try:
        yield
    finally:
        _recording.close()
        _recording = None


@contextmanager
def step_span(step: int) -> Iterator[None]:
    """Set the current step to `step`, and record the enclosed code as its span."""
    if _recording is not None:
        _recording.step = step
    with span("step"):
        yield


@contextmanager
def span(kind: Kind, name: str = "") -> Iterator[None]:
    """Record the enclosed code as a span of this kind."""
    recording = _recording
    if recording is None or not recording.is_on:
        yield
        return
    started, step = time.time(), recording.step
    yield
    recording.write(kind, name, step, started)


def message(name: str, sent: float) -> Callable[[], None] | None:
    """Start the span of a message of `sent` bytes, and return a function that ends it when the message has arrived.

    Any thread may call the function. Returns None if nothing is recorded.
    """
    recording = _recording
    if recording is None or not recording.is_on:
        return None
    started, step = time.time(), recording.step
    return lambda: recording.write("message", name, step, started, bytes=sent)
