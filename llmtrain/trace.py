"""Time spans on this rank, for timelines: its work in selected steps, and the messages in flight during them.

`open_trace` starts a recording. A process has at most one; without one, the other functions record nothing.
A span is a line of JSON: kind, name, step, start and end (Unix seconds), and bytes for messages. Kinds: `step` (a
complete step), `data`, `gradient` (forward, backward and the optimizer), `exposed` (training waits for
synchronization), `wait` (the part of `exposed` that waits for the slowest replica), `delay` (injected) and `message`
(between replicas, in the background). On a GPU, the times are the device's, because the host runs ahead of it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from llmtrain.files import read_lines

Kind = Literal["step", "data", "gradient", "exposed", "wait", "delay", "message"]

Mark = Callable[[], float | None]
"""A moment, as a function that returns its Unix time in seconds, or None as long as the device has not reached it."""
Clock = Callable[[], Mark]
"""A function that marks the present moment. On a GPU, that is the end of the work enqueued in the current stream."""


def host_mark() -> Mark:
    """Mark the present moment by the host's clock."""
    now = time.time()
    return lambda: now


class Recording:
    """Recording of spans that begin in steps `first` to `last`, written to `path` when their times are known."""

    def __init__(self, path: Path, first: int, last: int, clock: Clock, resumed_at: int = 0):
        """Keep the spans that earlier starts recorded up to step `resumed_at`, because these steps are not repeated."""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if line["step"] <= resumed_at]
        self.first, self.last, self.step, self.clock = first, last, 0, clock
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._file.writelines(json.dumps(line) + "\n" for line in kept)
        self._unwritten: list[tuple[Mark, Mark, dict[str, Any]]] = []
        self._lock = threading.Lock()  # messages end on the backend's threads

    @property
    def is_on(self) -> bool:
        """Return whether a span that begins now is recorded."""
        return self.first <= self.step <= self.last

    def add(self, start: Mark, end: Mark, line: dict[str, Any]) -> None:
        """Record a span from `start` to `end`, with the other entries of `line`. Thread-safe: no device is asked for a time."""
        with self._lock:
            if not self._file.closed:
                self._unwritten.append((start, end, line))

    def write_known(self) -> None:
        """Write the spans whose times are known by now. Called on the training thread, whose device has the marks' times."""
        with self._lock:
            unwritten, self._unwritten = self._unwritten, []
            for start, end, line in unwritten:
                times = {"start": start(), "end": end()}
                if None in times.values():
                    self._unwritten.append((start, end, line))
                else:
                    with suppress(OSError):  # a full disk costs spans of the timeline, not the run
                        self._file.write(json.dumps(line | times) + "\n")

    def close(self) -> None:
        """Close the file. Spans still in flight are not recorded."""
        self.write_known()
        with self._lock:
            self._unwritten.clear()
            with suppress(OSError):
                self._file.close()


_recording: Recording | None = None


@contextmanager
def open_trace(path: Path, first: int, last: int, clock: Clock = host_mark, resumed_at: int = 0) -> Iterator[None]:
    """Record the spans of steps `first` to `last` in the file `path`, within this context. `clock` is the training
    device's clock. The file's spans of steps up to `resumed_at` are kept."""
    global _recording
    _recording = Recording(path, first, last, clock, resumed_at)
    try:
        yield
    finally:
        _recording.close()
        _recording = None


@contextmanager
def step_span(step: int) -> Iterator[None]:
    """Set the recording's current step to `step`, and record the enclosed code as a span of kind `step`."""
    if _recording is not None:
        _recording.step = step
        _recording.write_known()
    with span("step"):
        yield


@contextmanager
def span(kind: Kind, name: str = "") -> Iterator[None]:
    """Record the enclosed code as a span of this kind."""
    recording = _recording
    if recording is None or not recording.is_on:
        yield
        return
    start, step = recording.clock(), recording.step
    yield
    recording.add(start, recording.clock(), {"kind": kind, "name": name, "step": step})


def message(name: str, sent: float, in_stream: bool = False) -> Callable[[], None] | None:
    """Start the span of a message of `sent` bytes, and return a function that ends it when the message has arrived.

    With `in_stream`, the message is work in a device's stream. Its span starts when the current stream has completed
    its work so far. It ends when the stream that is current during the call of the returned function has completed the
    work enqueued by then. Otherwise, the host's clock gives both moments. Any thread may call the returned function.
    Returns None if nothing is recorded.
    """
    recording = _recording
    if recording is None or not recording.is_on:
        return None
    clock = recording.clock if in_stream else host_mark
    start, line = clock(), {"kind": "message", "name": name, "step": recording.step, "bytes": sent}
    return lambda: recording.add(start, clock(), line)
