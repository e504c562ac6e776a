"""torch's own search for data races between streams (CSAN), listening to emulated ones.

It knows a tensor by its address: what only meets in parts of one memory is not seen. Collectives count as done in the stream
that they were started from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.emulated_gpu import as_cuda, streams


@contextmanager
def looked_for() -> Iterator[None]:
    """Raises torch's CUDASanitizerErrors, in the operation that is one side of a race, and prints the races, as on a GPU."""
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
