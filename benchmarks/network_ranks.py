"""Ranks of network.py: real methods on a stand-in for a model, whose steps take a given time."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loops import Pace
from network_cells import Cell
from stragglers import StandIn

if TYPE_CHECKING:
    from llmtrain.config import SyncSection
    from llmtrain.parallel.comms import Comms
    from llmtrain.parallel.mesh import Mesh
    from llmtrain.parallel.wire_format import WireFormat

BLOCKS = 6
FORWARD = 1 / 3
"""Forward's share of a step. Forward uses the blocks in order, and backward yields their gradients, the last block's first."""
UPDATED = 4096
"""Number of values that a step changes in each block: enough for a pseudo-gradient, but too few to take noticeable CPU time."""
TIMEOUT_SECONDS = 900
SENT = "/sys/class/net/{}/statistics/tx_bytes"


class PacedStandIn(StandIn):
    """Stand-in whose forward waits for its hooks block by block, and whose backward sends gradients block by block."""

    def __init__(self, replica: Comms, values: int, seconds: Callable[[int], float]):
        import torch

        from llmtrain.parallel.engine import Block

        super().__init__(replica, min(values, UPDATED), seconds)
        self.blocks = [Block(f"block {i}", [torch.zeros(values)]) for i in range(BLOCKS)]
        self.pace = Pace()
        self.wire: WireFormat | None = None
        """Wire format of gradients."""

    def step(self, step: int, lr: float) -> None:
        """Take one step of this replica, and average its gradients if the method asks for it."""
        import torch

        seconds, pace, averaging = self.seconds(step) / len(self.blocks), self.pace, []
        for index in range(len(self.blocks)):
            for hook in self._hooks:
                hook(index)
            pace.resume()
            pace.run(FORWARD * seconds)
            pace.pause()
        pace.resume()
        for block in reversed(self.blocks):
            pace.run((1 - FORWARD) * seconds)
            if self.average_gradients:
                averaging.append(
                    self.replica.start_all_reduce(torch.zeros_like(block.shards[0]), "gradients", self.wire)
                )
            block.shards[0][:UPDATED].add_(self._updates[step % len(self._updates)], alpha=lr)
        pace.pause()
        for pending in averaging:
            pending.start_second_phase()
        for pending in averaging:
            pending.wait()


def measure(task: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Measure one cell after another on the mesh of all hosts. The main rank returns all ranks' measurements per cell."""
    import torch

    from llmtrain.parallel.mesh import open_process_mesh
    from llmtrain.parallel.world import World

    torch.set_num_threads(1)
    answers = []
    with open_process_mesh(
        World.from_environment(),
        replicas=task["replicas"],
        shards=task["shards"],
        replica_backend="auto",
        timeout_seconds=TIMEOUT_SECONDS,
        connections=task["connections"] or "auto",
    ) as mesh:
        for number, cell in enumerate(task["cells"]):
            sync = Cell(**cell | {"keys": tuple(cell["keys"])}).sync()
            own = measure_cell(sync, mesh, number, task)
            rows = mesh.all_ranks.all_gather_object(own, "collecting measurements")
            answers.append({"cell": cell, "ranks": rows})
            if mesh.is_main:
                Path(task["progress"]).write_text(f"{number + 1}")
    return answers if mesh.is_main else None


def measure_cell(sync: SyncSection, mesh: Mesh, number: int, task: dict[str, Any]) -> dict[str, list[float] | float]:
    """Return this rank's measurements of steps alone and of a method's rounds after the first one. A collective of all ranks."""
    import torch.distributed as dist

    from llmtrain.config import LRScheduleSection
    from llmtrain.lr import LRSchedule
    from llmtrain.parallel.wire_format import WireFormat
    from llmtrain.sync.build_method import build_method

    replica = mesh.replica_comms

    def worth(step: int) -> float:
        return steps_worth(task["jitter"], number, replica.rank, step)

    engine = PacedStandIn(replica, task["values"], lambda step: task["step_seconds"] * worth(step))
    if sync.wire.gradients and sync.wire.kind != "fp32":
        engine.wire = WireFormat(sync.wire.kind)
    alone = steps_alone(engine, mesh, task["alone_steps"], worth)
    endless = LRSchedule(1e-3, 10**9, LRScheduleSection(kind="constant"))
    store = dist.PrefixStore(f"cell {number}", mesh.store)
    method = build_method(
        sync, engine, replica, mesh.shard_comms, endless, seed=0, store=store, timeout_seconds=TIMEOUT_SECONDS
    )
    averages, timed = sync.period.averages_gradients, sync.period.is_timed
    rounds = task["gradient_rounds" if averages else "rounds"]
    start_together(mesh)
    step, marks = 0, []
    while len(marks) <= rounds:
        step += 1
        plan = method.begin_step(step, endless.at(step))
        engine.step(step, plan.lr)
        method.end_step(step)
        if averages or (method.agreed_step(step) is not None if timed else method.period.ends_round(step)):
            marks.append((step, time.perf_counter(), card_bytes(task["interface"]), replica.traffic.waiting.seconds))
    debt = engine.pace.debt
    method.finish()
    method.close()
    steps, ends, sent, waited = (list(column) for column in zip(*marks, strict=True))
    return {
        "alone": alone,
        "steps": [sum(worth(step) for step in range(a + 1, b + 1)) for a, b in itertools.pairwise(steps)],
        "seconds": differences(ends),
        "sent": differences(sent),
        "waited": differences(waited),
        "debt": debt,
    }


def steps_alone(engine: PacedStandIn, mesh: Mesh, steps: int, worth: Callable[[int], float]) -> float:
    """Return the mean seconds, without a method, of a step of length 1."""
    engine.average_gradients = False
    start_together(mesh)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        engine.step(step, 1e-3)
    return (time.perf_counter() - started) / sum(worth(step) for step in range(1, steps + 1))


def start_together(mesh: Mesh) -> None:
    """Wait for all ranks."""
    import torch

    mesh.all_ranks.all_gather(torch.zeros(1), "starting together")


def steps_worth(jitter: float, cell: int, replica: int, step: int) -> float:
    """Return the length of a replica's step: 1, or with jitter a normal random number around 1, equal on all ranks of the replica."""
    if not jitter:
        return 1.0
    return max(0.1, random.Random(f"{cell} {replica} {step}").gauss(1.0, jitter))


def card_bytes(interface: str) -> int:
    """Return the bytes that this host has sent."""
    return int(Path(SENT.format(interface)).read_text())


def differences(values: Sequence[float]) -> list[float]:
    """Return the difference of each value from the one before."""
    return [b - a for a, b in itertools.pairwise(values)]
