"""Resource limits for a host of a virtual cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from llmtrain.errors import ClusterError


@dataclass(frozen=True)
class HostLimits:
    """Limits of one host; None means no limit. Raises ClusterError for values that are not positive and finite."""

    bandwidth_mbit: float | None = None
    """Mbit/s of each network card in each direction, including headers (TCP carries 4.3 % less, as on real cards)."""
    latency_ms: float | None = None
    """Milliseconds by which everything it sends is delayed. Needs netem in the kernel."""
    cpus: float | None = None
    """Cores' worth of CPU time for all its processes together; 0.5 is half a core."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ClusterError(f"{field.name}={value} of a host: expected a number above 0, or none for no limit")
