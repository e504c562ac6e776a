"""Memory of this process as the system and as torch's allocator count it."""

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
    """Bytes of it that are in memory now; None where the system does not say."""
    return _status("VmRSS")


def peak_resident() -> int | None:
    """The most so far, or since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> None:
    """The peak begins anew from now, where the system can; also a GPU's."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    if FORGET.exists():
        FORGET.write_text("5")


def reserved() -> int | None:
    """Return the most bytes that torch has taken from the GPU, handed out or not. None before a GPU was used."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else None


def allocator_peak(work: Callable[[], object]) -> int:
    """The most bytes that torch's CPU allocator had handed out at a time during `work`, of what it handed out in it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return highest(json.loads(trace.read_text())["traceEvents"])


def highest(events: Iterable[Mapping[str, Any]]) -> int:
    """The most that a trace's memory events add up to. Their own totals go on from earlier traces."""
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate((change for _, change in changes), initial=0))


def _status(key: str) -> int | None:
    if not STATUS.exists():
        return None
    found = re.search(rf"^{key}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
