"""A method of synchronisation: a period, a synchroniser and a schedule, behind the few calls the trainer makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmtrain.config import Layerwise, SyncSection
from llmtrain.lr import LearningRates
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Engine
from llmtrain.sync.anchors import Anchors
from llmtrain.sync.outer import build_outer
from llmtrain.sync.penalty import Penalty
from llmtrain.sync.period import Period, build_period
from llmtrain.sync.report import SyncReport
from llmtrain.sync.synchroniser import Synchroniser

BLOCKING_PREFETCH = 2
"""Reductions under way beyond the one being finished when all blocks synchronise at once."""


class Method:
    """How replicas agree. The trainer calls `begin_step`, runs a step, calls `end_step`; and `finish` at the end.

    A due synchronisation is *armed*. The blocking schedule carries it out at once; the layer-wise one as the next
    training forward reaches each block.
    """

    def __init__(self, engine: Engine, period: Period, synchroniser: Synchroniser, layerwise: bool):
        self.engine, self.period, self.synchroniser, self.layerwise = engine, period, synchroniser, layerwise
        self._local_steps = 0  # since the last synchronisation
        self._next_block: int | None = None  # of the armed synchronisation
        engine.before_block(self._before_block)

    def begin_step(self, step: int) -> None:
        """Before the forward of step `step` (from 1)."""
        self.engine.average_gradients = self.period.is_synchronous(step)
        anchors = self.synchroniser.anchors
        if anchors is not None and not anchors.taken and not self.engine.average_gradients:
            anchors.take()

    def end_step(self, step: int) -> None:
        """After the optimizer step of step `step`."""
        if self.period.is_synchronous(step):
            return
        self._local_steps += 1
        if self.period.ends_round(step):
            self._next_block = 0
            if not self.layerwise:
                self._carry_out()

    def finish(self) -> None:
        """Carry out what is armed, or a last, shorter round: after it all replicas are equal."""
        if self._next_block is None and self._local_steps > 0:
            self._next_block = 0
        if self._next_block is not None:
            self._carry_out()

    @property
    def is_synchronised(self) -> bool:
        """All replicas hold the same parameters, and nothing is armed."""
        return self._local_steps == 0

    def report(self) -> SyncReport:
        """Counters so far."""
        return self.synchroniser.report

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs: `anchor` and `momentum` are lists of flat tensors by block, empty where the
        method keeps none; the rest is plain values."""
        synchroniser = self.synchroniser
        return {
            **(synchroniser.anchors.state_dict() if synchroniser.anchors else {"anchor": [], "momentum": []}),
            "penalty": synchroniser.penalty.state_dict() if synchroniser.penalty else None,
            "report": synchroniser.report.state_dict(),
            "local_steps": self._local_steps,
            "armed": self._next_block is not None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, between steps."""
        if self.synchroniser.anchors is not None:
            self.synchroniser.anchors.load_state_dict(state)
        if self.synchroniser.penalty is not None:
            self.synchroniser.penalty.load_state_dict(state["penalty"])
        self.synchroniser.report.load_state_dict(state["report"])
        self._local_steps = state["local_steps"]
        self._next_block = 0 if state["armed"] else None

    def _carry_out(self) -> None:
        for index in range(len(self.engine.blocks)):
            self._before_block(index)

    def _before_block(self, index: int) -> None:
        if self._next_block is None:
            return
        assert index == self._next_block, f"block {index} was reached before block {self._next_block}"
        with self._exposed():
            if index == 0:
                self.synchroniser.open()
            self.synchroniser.synchronise(index)
            self._next_block = index + 1
            if self._next_block == len(self.engine.blocks):
                self.synchroniser.close()
                self._next_block, self._local_steps = None, 0

    @contextmanager
    def _exposed(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.synchroniser.report.exposed_seconds += time.monotonic() - started


def build_method(sync: SyncSection, engine: Engine, replica: Comms, shard: Comms, rates: LearningRates) -> Method:
    """Put a method together from the choices of a recipe's `sync` section.

    `replica` and `shard` are the two axes of the mesh; `rates` are the run's, for periods that follow them.
    """
    outer = build_outer(sync.outer)
    needs_anchor = sync.penalty is not None or sync.outer.kind != "average"
    layerwise = isinstance(sync.schedule, Layerwise)
    synchroniser = Synchroniser(
        engine,
        replica,
        shard,
        outer,
        Anchors(engine.blocks, outer.has_momentum, sync.offload) if needs_anchor else None,
        Penalty(sync.penalty, replica.size, len(engine.blocks)) if sync.penalty else None,
        sync.schedule.prefetch if layerwise else BLOCKING_PREFETCH,
    )
    return Method(engine, build_period(sync.period, sync.warmup_steps, rates), synchroniser, layerwise)
