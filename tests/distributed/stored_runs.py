"""Short deterministic runs of every method under both engines, stopped halfway and resumed. A-EDiT's clock counts steps, and
WAGMA's replicas are late as planned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from llmtrain.config import Recipe
from llmtrain.sync.methods import METHODS, inner_preset
from llmtrain.train.trainer import Trainer
from tests.distributed.pool import RankPool
from tests.distributed.reshard_runs import Part, Seen, fit, recipe_of, trainer_of, write_texts

STOPPED_AFTER = 8
"""Step in the second round after which runs are stopped. A validation there makes all ranks agree on the stop at once."""
PATIENCE_SECONDS = 60.0
STEPS = ("train.steps=13", "checkpoint.every=100", "log.every=2", "eval.every=4", "sync.warmup_steps=2")
EVERY = ("sync.period.every=4",)
KEYS: dict[str, tuple[str, ...]] = {
    "synchronous": ("sync.period={kind: every_step}",),
    "local_sgd": EVERY,
    "post_local_sgd": EVERY,
    "qsr": ("sync.period={kind: qsr, base: 2, alpha: 0.009}",),
    "des_loc": (*EVERY, "sync.moments={first: 1, second: 2}"),
    "slowmo": EVERY,
    "diloco": (*EVERY, "sync.wire={kind: int4, error_feedback: true}"),
    "muloco": EVERY,
    "sparseloco": (*EVERY, "sync.wire.keep=512"),
    "streaming_diloco": (
        "sync.period.every=6",
        "sync.schedule={steps: 2, fragments: 2}",
        "sync.wire.error_feedback=true",
    ),
    "co2": EVERY,
    "palsgd": (*EVERY, "sync.pull.probability=0.4"),
    "wagma": (*EVERY, "sync.schedule.group_size=2"),
    "edit": EVERY,
    "snoo": EVERY,
    "gpa": ("sync.outer.decay=0.5",),
    "a_edit": ("sync.period={kind: seconds, every: 3, min_steps: 0}",),
}
ENGINES: dict[str, tuple[str, ...]] = {
    "fsdp2": (),
    "zero": ("parallel.engine=zero", "parallel.zero_stage=2", "parallel.precision=fp32"),
}
SECONDS_PER_STEP = (0.5, 1.5)
"""Seconds per step of each replica, if rounds are of seconds."""
LATE = {(1, 1), (4, 0), (5, 0)}
"""(iteration, replica) of WAGMA at which the replica contributes the message of the iteration before."""


class PlannedStarts:
    """Replacement of the signal that wakes group averages. An average begins when all replicas on time have arrived, and not before
    late replicas have finished what they contribute."""

    def __init__(self, trainer: Trainer):
        self.schedule, self.mesh = trainer.method.schedule, trainer.metrics.mesh
        self.worker, self.store = self.schedule.averager, dist.PrefixStore("planned", trainer.metrics.mesh.store)
        self.replica = trainer.metrics.mesh.replica_comms.rank
        self.worker.wake_signal = self
        end_step = trainer.method.end_step

        def held(step: int, tokens: int) -> None:
            if (self.schedule._iteration, self.replica) in LATE and self.worker.is_running:
                self._until(lambda: self.worker._done >= self.schedule._iteration)
            end_step(step, tokens)

        trainer.method.end_step = held

    def announce(self, iteration: int) -> None:
        """Say that this replica has arrived."""
        self.store.add(f"arrived {iteration}", 1)

    def wait(self, iteration: int) -> bool:
        """Wait until the iteration begins. Return False if there are no more iterations."""
        on_time = sum((iteration, replica) not in LATE for replica in range(self.mesh.replicas))
        needed = iteration - ((iteration, self.replica) in LATE)

        def begins() -> bool:
            return self.store.add(f"arrived {iteration}", 0) == on_time and self.worker.latest()[0] >= needed

        self._until(lambda: self._is_over(iteration) or begins())
        return not self._is_over(iteration)

    def end(self, iteration: int) -> None:
        """Say that there are no more iterations."""
        self.store.set(f"end {iteration}", "")

    def forget(self, iterations: Iterable[int]) -> None:
        """Keep everything."""

    def _is_over(self, iteration: int) -> bool:
        return self.worker._closing or self.store.check([f"end {iteration}"])

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "a planned start did not come"
            time.sleep(0.0005)


def train(recipe: Recipe, mesh: tuple[int, int], stop_after: int | None) -> str:
    """Train from the newest checkpoint to the end, or until a request to stop after step `stop_after`. Return how training ended on
    this rank."""
    torch.manual_seed(0)
    seconds = SECONDS_PER_STEP if recipe.sync.period.kind == "seconds" else ()
    trainer = trainer_of(Part(recipe, *mesh, recipe.train.total_steps + 1, seconds), Seen())
    trainer.metrics.stop.requested, trainer.recipe = False, recipe
    trainer.checkpointer.section = recipe.checkpoint
    if recipe.sync.schedule.kind == "wait_avoiding":
        PlannedStarts(trainer)
    end_step = trainer.method.end_step

    def asked_to_stop(step: int, tokens: int) -> None:
        end_step(step, tokens)
        trainer.metrics.stop.requested |= step == stop_after

    trainer.method.end_step = asked_to_stop
    try:
        return fit(trainer)
    finally:
        trainer.method.close()


@dataclass(frozen=True)
class Case:
    """Run to store."""

    name: str
    mesh: tuple[int, int]
    overrides: tuple[str, ...]


def cases() -> list[Case]:
    """Return cases of every method under both engines, with shards where the method does not need a clock of each rank."""
    found = []
    for method in METHODS:
        mesh = (2, 1) if method in ("a_edit", "wagma") else (2, 2)
        for engine, keys in ENGINES.items():
            if engine == "zero" and inner_preset(method):
                continue  # Muon needs fsdp2
            found.append(Case(f"{method}-{engine}", mesh, (f"sync.method={method}", *STEPS, *KEYS[method], *keys)))
    return found


def store(folder: Path) -> None:
    """Train all cases with this source tree, in FOLDER/runs."""
    folder.mkdir(parents=True)
    write_texts(folder)
    for case in cases():
        began, recipe = time.monotonic(), recipe_of(folder, case.name, *case.overrides)
        for stop_after, ending in ((STOPPED_AFTER, "signal"), (None, "done")):
            pool = RankPool(math.prod(case.mesh))  # a new one, because DeepSpeed numbers parameters across engines
            try:
                endings = pool.run(train, recipe, case.mesh, stop_after)
            finally:
                pool.close()
            assert set(endings) == {ending}, (case.name, endings)
        print(f"{case.name}: {time.monotonic() - began:.1f} s", flush=True)
