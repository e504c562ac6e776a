"""Faults inside the ranks of a trial: sleeps and garbage. They depend only on the seed, the step and the hosts, so they
are the same for every method.

This module is also the program of such a rank: `python -m llmtrain.compare.faults FAULTS RECIPE KEY=VALUE...` trains as
`llmtrain train` does, with faults (JSON of `Faults`).
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from llmtrain.startup import imports_without_gc

with imports_without_gc():
    import torch

    from llmtrain.compare.comparison import DelaySection, GarbageSection
    from llmtrain.config import Section
    from llmtrain.data.loader import PrefetchLoader
    from llmtrain.errors import exit_with_status
    from llmtrain.loss import IGNORE_INDEX
    from llmtrain.parallel.world import World
    from llmtrain.recipe_loader import load_recipe
    from llmtrain.trace import span
    from llmtrain.train.run import run_training
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


def inject(trainer: Trainer, faults: Faults, host: int) -> None:
    """Add the faults of `host` to a trainer."""
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
            torch.where(
                b == IGNORE_INDEX,  # padding stays
                b,
                torch.randint(int(b.max()) + 1, b.shape, generator=self._drawn, dtype=b.dtype).to(b.device),
            )
            for b in batches
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def main(faults: str, recipe: str, *overrides: str) -> int:
    """Train with faults (JSON) and return the exit code. torchrun sets the number of this host (GROUP_RANK)."""
    parsed, host = Faults.model_validate_json(faults), int(os.environ["GROUP_RANK"])
    loaded, world = load_recipe(recipe, overrides), World.from_environment()
    return run_training(loaded, world, lambda trainer: inject(trainer, parsed, host))


if __name__ == "__main__":
    exit_with_status(lambda: sys.exit(main(*sys.argv[1:])))
