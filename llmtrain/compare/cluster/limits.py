"""What a host of a virtual cluster is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from llmtrain.errors import ClusterError


@dataclass(frozen=True)
class HostLimits:
    """Of one host. None: no limit. Raises ClusterError for values that are no positive, finite numbers."""

    bandwidth_mbit: float | None = None
    """Mbit/s of its network cards, in each direction, headers included (as with real cards, TCP carries 4.3 % less)."""
    latency_ms: float | None = None
    """How much later everything that it sends arrives, in milliseconds. Needs netem in the kernel."""
    cpus: float | None = None
    """How many cores' time its processes may use together; 0.5: half a core."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ClusterError(f"{field.name}={value} of a host: expected a number above 0, or none for no limit")
