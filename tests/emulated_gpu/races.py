"""torch's own search for data races between streams (CSAN), as a listener of emulated streams.

It identifies tensors by their addresses, and misses races between tensors that overlap only in part. Collectives count
as work of the stream that has started them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.emulated_gpu import as_cuda, streams


@contextmanager
def looked_for() -> Iterator[None]:
    """Raise torch's CUDASanitizerErrors in an operation on one side of a race, and print the races, as on a GPU."""
    import torch
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    emulated = as_cuda.loaded()
    mode = CUDASanitizerDispatchMode()
    seen = mode.event_handler
    handlers: dict[str, Any] = {
        "stream made": seen._handle_stream_creation,
        "event made": seen._handle_event_creation,
        "recorded": seen._handle_event_record,
        "waits": lambda stream, event: seen._handle_event_wait(event, stream),
        "host waits": lambda stream: (
            seen._handle_device_synchronization() if stream is None else seen._handle_stream_synchronization(stream)
        ),
    }

    def hear(what: str, *ids: int | None) -> None:
        handlers[what](*ids)

    streams.listeners.append(hear)
    emulated.reuse_memory(False)
    try:
        with mode:
            yield
    finally:
        torch.cuda.synchronize()
        emulated.reuse_memory(True)
        streams.listeners.remove(hear)
