"""Private parts of torch that tests need: a kernel that takes time, and how often torch.compile has compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def occupy_stream(cycles: int) -> None:
    """Keep the current stream busy for that many clock cycles of the GPU. The host goes on."""
    torch.cuda._sleep(cycles)


@dataclass(frozen=True)
class Compilations:
    """Counts of torch.compile in this process since the last `forget_compilations`."""

    graphs: int
    """Graphs that were compiled, again ones included."""
    breaks: dict[str, int]
    """Places at which a graph ended too early, and how often."""


def compilations() -> Compilations:
    """Return the counts so far."""
    from torch._dynamo.utils import counters

    return Compilations(counters["stats"]["unique_graphs"], dict(counters["graph_break"]))


def forget_compilations() -> None:
    """Drop compiled code and counts."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
