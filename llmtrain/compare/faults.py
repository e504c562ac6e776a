"""Faults that happen inside a rank: sleeps in the forward pass, nonsense as data. By a schedule that is a function of seed,
step and host alone, so it is the same for every method."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from llmtrain.compare.comparison import DelaySection, GarbageSection
from llmtrain.config import Section
from llmtrain.data.prefetch import PrefetchLoader
from llmtrain.reshard import Rule
from llmtrain.trace import span
from llmtrain.train.trainer import Trainer


class Faults(Section):
    """What is to happen on which of `hosts` hosts; travels to the ranks as JSON."""

    seed: int
    hosts: int
    delays: DelaySection | None = None
    garbage: GarbageSection | None = None

    def delay(self, host: int, step: int) -> float:
        """Seconds that a host sleeps in its `step`-th step (from 1)."""
        if self.delays is None:
            return 0.0
        victim = self.delays.host
        if victim == "random":
            victim = random.Random(f"{self.seed}, who sleeps in step {step}").randrange(self.hosts)
        return self.delays.seconds if host == victim else 0.0

    def reads_garbage(self, host: int, step: int) -> bool:
        """Whether the host's data is nonsense in its `step`-th step."""
        section = self.garbage
        return section is not None and host == section.host and section.first <= step <= section.last


def inject(faults: Faults, host: int) -> Callable[[Trainer], None]:
    """What changes a trainer on that host so that the faults happen."""

    def change(trainer: Trainer) -> None:
        if faults.delays is not None:
            trainer.engine.register_block_hook(_sleeper(faults, host, trainer))
        if faults.garbage is not None:
            trainer.loader = GarbageLoader(
                trainer.loader, lambda: faults.reads_garbage(host, trainer.state.step), faults.seed
            )

    return change


def _sleeper(faults: Faults, host: int, trainer: Trainer) -> Callable[[int], None]:
    slept_in = trainer.state.step

    def sleep(index: int) -> None:
        nonlocal slept_in
        if index == 0 and trainer.state.step != slept_in:  # once a step, whatever the micro-batches
            slept_in = trainer.state.step
            if seconds := faults.delay(host, trainer.state.step):
                with span("delay"):
                    time.sleep(seconds)

    return sleep


class GarbageLoader:
    """Batches of another loader, with their tokens replaced at random while `is_on()`. They are used up all the same."""

    def __init__(self, loader: PrefetchLoader, is_on: Callable[[], bool], seed: int):
        self._loader, self._is_on = loader, is_on
        self._drawn = torch.Generator().manual_seed(seed)

    def next(self) -> list[torch.Tensor]:
        """The batch of a step: tokens [micro_batch, sequence_length + 1] of each micro-batch."""
        batches = self._loader.next()
        if not self._is_on():
            return batches
        return [self._garbage_like(batch) for batch in batches]

    def _garbage_like(self, batch: torch.Tensor) -> torch.Tensor:
        """Tokens up to the largest that occurs, which is near the vocabulary's end."""
        drawn = torch.randint(int(batch.max()) + 1, batch.shape, generator=self._drawn, dtype=batch.dtype)
        return drawn.to(batch.device)

    def state_dict(self) -> dict[str, Any]:
        """The other loader's."""
        return self._loader.state_dict()

    def reshard_rule(self) -> Rule:
        """The other loader's."""
        return self._loader.reshard_rule()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self._loader.load_state_dict(state)
