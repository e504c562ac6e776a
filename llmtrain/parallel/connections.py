"""Number of connections between two replicas: several where a round trip takes long.

gloo sums a message in parts of at most 2 MiB, each after a round trip in which the receiver says that it is ready. One
connection therefore leaves a long link mostly idle. On several connections, messages of different blocks, and the parts of large
ones, wait for their round trips at the same time. Rounded messages have one connection: their receivers are ready beforehand
(`exchanges.py`), and more connections would pause for longer, after which TCP starts slowly.
"""

from __future__ import annotations

import time

import torch

from llmtrain.parallel.comms import Comms

FAR_SECONDS = 0.01
"""Minimum round trip, in seconds, for several connections. With shorter round trips, several are no faster, and a
layer-wise schedule would wait longer, because blocks would arrive together at the end instead of one by one."""
SEVERAL = 4
"""Connections between replicas that are far apart. Blocking schedules have three messages in flight; others have more."""
TRIES = 5
"""Number of exchanges that are timed; the shortest counts. The first one also waits for ranks that are late."""


def connections_for(round_trip: float) -> int:
    """Return the number of connections between replicas whose round trip takes `round_trip` seconds."""
    return SEVERAL if round_trip >= FAR_SECONDS else 1


def longest_round_trip(replica: Comms, all_ranks: Comms) -> float:
    """Return the seconds of the longest round trip between replicas, equal on all ranks: the maximum over ranks of each rank's
    shortest exchange. A collective of all ranks."""
    uncounted, nothing, seconds = replica.with_own_traffic(), [torch.zeros(1)] * replica.size, []
    for _ in range(TRIES):
        began = time.perf_counter()
        uncounted.start_all_to_all(nothing, [1] * replica.size, "measuring the round trip").wait()
        seconds.append(time.perf_counter() - began)
    shortest = torch.tensor([min(seconds)], dtype=torch.float64)
    return float(all_ranks.all_gather(shortest, "comparing round trips").max())
