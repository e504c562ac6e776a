"""Faults of a condition: sleeps and garbage inside the ranks, and pauses and deaths of hosts.

The faults inside a rank depend only on the seed, the step and the hosts, so they are the same for every method.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llmtrain.compare.cluster import Host
from llmtrain.compare.comparison import ConditionSection, DelaySection, GarbageSection
from llmtrain.config import Section
from llmtrain.data.prefetch import PrefetchLoader
from llmtrain.trace import span
from llmtrain.train.trainer import Trainer


class Faults(Section):
    """Faults inside the ranks of `hosts` hosts, passed to the ranks as JSON."""

    seed: int
    hosts: int
    delays: DelaySection | None = None
    garbage: GarbageSection | None = None

    def delay(self, host: int, step: int) -> float:
        """Return the seconds that `host` sleeps in its `step`-th step (from 1)."""
        if self.delays is None:
            return 0.0
        victim = self.delays.host
        if victim == "random":
            victim = random.Random(f"{self.seed}, who sleeps in step {step}").randrange(self.hosts)
        return self.delays.seconds if host == victim else 0.0

    def reads_garbage(self, host: int, step: int) -> bool:
        """Return whether the data of `host` is garbage in its `step`-th step."""
        section = self.garbage
        return section is not None and host == section.host and section.first <= step <= section.last


def inject(faults: Faults, host: int) -> Callable[[Trainer], None]:
    """Return a function that adds the faults of `host` to a trainer."""

    def change(trainer: Trainer) -> None:
        slept_in = trainer.state.step

        def sleep(block: int) -> None:
            nonlocal slept_in
            if block == 0 and trainer.state.step != slept_in:  # once per step, however many micro-batches it has
                slept_in = trainer.state.step
                if seconds := faults.delay(host, slept_in):
                    with span("delay"):
                        time.sleep(seconds)

        if faults.delays is not None:
            trainer.engine.register_block_hook(sleep)
        if faults.garbage is not None:
            trainer.loader = GarbageLoader(
                trainer.loader, lambda: faults.reads_garbage(host, trainer.state.step), faults.seed
            )

    return change


class GarbageLoader:
    """Loader wrapper that returns random tokens while `is_on()`. The wrapped loader's batches are consumed anyway."""

    def __init__(self, loader: PrefetchLoader, is_on: Callable[[], bool], seed: int):
        self._loader, self._is_on = loader, is_on
        self._drawn = torch.Generator().manual_seed(seed)

    def next(self) -> list[torch.Tensor]:
        """Return the tokens [micro_batch, sequence_length + 1] of each micro-batch of a step.

        Garbage is drawn up to the largest token in the micro-batch, which is near the vocabulary's end.
        """
        batches = self._loader.next()
        if not self._is_on():
            return batches
        return [
            torch.randint(int(b.max()) + 1, b.shape, generator=self._drawn, dtype=b.dtype).to(b.device) for b in batches
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def host_events(condition: ConditionSection, hosts: Sequence[Host]) -> list[tuple[float, Callable[[], None]]]:
    """Return (seconds after training began, action) for each pause, its end and each death, in order of time."""
    pauses = [(pause.at, hosts[pause.host].pause) for pause in condition.pauses]
    resumes = [(pause.at + pause.seconds, hosts[pause.host].resume) for pause in condition.pauses]
    kills = [(kill.at, hosts[kill.host].kill) for kill in condition.kills]
    return sorted(pauses + resumes + kills, key=lambda event: event[0])
