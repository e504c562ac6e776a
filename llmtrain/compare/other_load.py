"""CPU time that other programs took during a trial. It makes equal trials take different times."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import psutil

BUSY, REST = ("user", "nice", "system", "steal"), ("idle", "iowait", "irq", "softirq")
"""Kinds of CPU time that psutil counts; not every system has all of them."""


class CpuSeconds(NamedTuple):
    """CPU seconds since the machine's start, summed over its cores."""

    total: float
    """CPU seconds of all kinds, including idle time."""
    busy: float
    """CPU seconds of all programs, and those that a hypervisor gave to other machines. Interrupts are left out, because
    the kernel handles a trial's packets in them."""
    own: float
    """CPU seconds of this process and its descendants, including those that have ended and were waited for."""


def cpu_seconds() -> CpuSeconds:
    """Return the CPU seconds so far."""
    machine, own = psutil.cpu_times(), 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended, and its time counts as its parent's
            times = process.cpu_times()
            own += times.user + times.system + times.children_user + times.children_system
    busy, rest = (sum(getattr(machine, kind, 0.0) for kind in kinds) for kinds in (BUSY, REST))
    return CpuSeconds(busy + rest, busy, own)


def other_load(since: CpuSeconds) -> float | None:
    """Return the share of the machine's CPU time that other programs have taken after the measurement `since`; None if
    the system does not count CPU time."""
    total, busy, own = (now - then for now, then in zip(cpu_seconds(), since, strict=True))
    return round(max(0.0, busy - own) / total, 4) if total > 0 else None
