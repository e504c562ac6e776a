"""How long a run takes and what the network adds to it, before it is run: arithmetic on two rates."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from llmtrain.config import (
    DelayedSection,
    EverySecondsSection,
    EveryStepSection,
    OverlappedSection,
    Recipe,
    WaitAvoidingSection,
)
from llmtrain.lr import LRSchedule
from llmtrain.parallel.wrapping import COMPUTE
from llmtrain.plan.memory import ModelSize
from llmtrain.plan.traffic import gradient_bytes, per_average, rounds_of
from llmtrain.sync.period import warmup_of

TRAINING_EFFICIENCY = 0.5
"""What training reaches of a machine's rate in large matrix products. By `benchmarks/throughput.py` on two cores in fp32, 0.42
with 6 M and 0.55 with 33 M parameters; on GPUs it was not measured."""
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of matrices whose product is timed."""
TURNS = 5


@dataclass(frozen=True)
class HardwareRates:
    """What a rank and a network do in a second."""

    flops: float
    """Floating-point operations of one rank in training."""
    mbit: float
    """Megabits from one replica to another, all its ranks together."""


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds; see `pace`."""

    step: float
    """One step's computing."""
    message: float
    """What a synchronization's bytes need."""
    waiting: float
    """Of the network for each step, on average."""
    run: float
    """The whole run."""

    @property
    def computing(self) -> float:
        """Share of the time that is not spent waiting for the network."""
        return self.step / (self.step + self.waiting)


def estimate_time(recipe: Recipe, size: ModelSize, replicas: int, shard: int, rates: HardwareRates) -> TimeEstimate:
    """An estimate on a `replicas` x `shard` mesh.

    A step computes 3 forward passes (6 operations a parameter and token, more for attention; `model.flops_per_token`), 4 with
    activation checkpointing, and waits for nothing within a replica. Messages take their bytes over `mbit`. What hides them is
    what the schedule lets training do meanwhile: nothing when blocking or layer by layer, `steps` steps when overlapped, rounds
    when delayed or wait-avoiding. Latency, slow hosts, validation and checkpoints are left out.
    """
    train, sync, steps = recipe.train, recipe.sync, recipe.train.total_steps
    again = 4 / 3 if recipe.parallel.activation_checkpointing is True else 1.0
    step = again * train.tokens_per_step * size.flops_per_token / (replicas * shard * rates.flops)

    def seconds(sent: float) -> float:
        return 8 * sent / (rates.mbit * 1e6)

    gradients = seconds(gradient_bytes(recipe, size, replicas))
    if replicas == 1 or isinstance(sync.period, EveryStepSection):
        return TimeEstimate(step, gradients, gradients, steps * (step + gradients))
    if isinstance(sync.period, EverySecondsSection):
        first = warmup_of(sync, LRSchedule.of(recipe))
        message = seconds(per_average(recipe, size, replicas, sync.wire.kind))
        every = max(1.0, sync.period.every / step)
    else:
        rounds = rounds_of(recipe, size, replicas)
        first, every, message = rounds.first, rounds.every, seconds(rounds.bytes)
    exposed = max(0.0, message - _hides(recipe, every) * step)
    waiting = (first * gradients + (steps - first) * exposed / every) / steps
    return TimeEstimate(step, message, waiting, steps * (step + waiting))


def _hides(recipe: Recipe, every: float) -> float:
    """Local steps that go on while a round's messages are under way."""
    schedule = recipe.sync.schedule
    if isinstance(schedule, OverlappedSection):
        return min(every, schedule.fragments * schedule.steps)
    return every if isinstance(schedule, DelayedSection | WaitAvoidingSection) else 0.0


def rate_here(recipe: Recipe) -> float:
    """Operations a second that a rank of this machine's device should reach in training: its rate in matrix products,
    timed now, times TRAINING_EFFICIENCY. A CPU's cores are shared by the ranks that the recipe starts on it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = MATMUL_SIZE[device]
    matrix = torch.ones(size, size, device=device, dtype=COMPUTE[recipe.parallel.precision])
    seconds = []
    for _ in range(TURNS + 1):
        began = time.perf_counter()
        torch.mm(matrix, matrix)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    sharing = math.prod(recipe.parallel.given_on_cpu) if device == "cpu" else 1
    return TRAINING_EFFICIENCY * 2 * size**3 / statistics.median(seconds[1:]) / sharing
