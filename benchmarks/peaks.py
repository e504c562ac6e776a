"""Memory of this process, as counted by the system and by torch's allocator."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int | None:
    """Return the resident bytes of this process, or None if the system does not report them."""
    return _status("VmRSS")


def peak_resident() -> int | None:
    """Return the largest number of resident bytes so far, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Reset the peak of resident memory, if the system supports it, and the GPU's, if one is in use."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    if FORGET.exists():
        FORGET.write_text("5")


def reserved() -> int | None:
    """Return the peak of the bytes that torch has reserved on the GPU, used or not, or None before a GPU is used."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else None


def allocator_peak(work: Callable[[], object]) -> int:
    """Run `work`, and return the peak bytes in use that torch's CPU allocator has handed out during `work`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return highest(json.loads(trace.read_text())["traceEvents"])


def highest(events: Iterable[Mapping[str, Any]]) -> int:
    """Return the peak of the running sum of a trace's memory events. Their own totals would include earlier traces."""
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def _status(key: str) -> int | None:
    if not STATUS.exists():
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
