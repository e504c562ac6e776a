"""Estimate of a run's duration and of its waits for the network, from the rates of a rank and of the network."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from llmtrain.config import (
    Recipe,
)
from llmtrain.lr import LRSchedule
from llmtrain.parallel.wrapping import COMPUTE
from llmtrain.plan.memory import ModelSize
from llmtrain.plan.traffic import gradient_bytes, per_average, rounds_of
from llmtrain.sync.period import warmup_of

TRAINING_EFFICIENCY = 0.5
"""Fraction of a machine's rate in large matrix products that training reaches. `benchmarks/throughput.py` measured 0.42
with 6 M and 0.55 with 33 M parameters, on two cores in fp32. GPUs were not measured."""
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices whose product is timed, by device type."""
TURNS = 5


@dataclass(frozen=True)
class HardwareRates:
    """Rates of a rank and of the network between replicas."""

    flops: float
    """Floating-point operations per second that one rank achieves in training."""
    mbit: float
    """Megabits per second from one replica to another, summed over its ranks."""


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated times in seconds; see `estimate_time`."""

    step: float
    """Computation of one step."""
    message: float
    """Transfer of the bytes of one synchronization."""
    waiting: float
    """Average wait for the network per step."""
    run: float
    """Duration of the run."""

    @property
    def computing(self) -> float:
        """Return the fraction of the time that is not spent waiting for the network."""
        return self.step / (self.step + self.waiting)


def estimate_time(recipe: Recipe, size: ModelSize, replicas: int, shard: int, rates: HardwareRates) -> TimeEstimate:
    """Estimate the times on a `replicas` x `shard` mesh.

    A step computes as much as 3 forward passes, which is 6 operations per parameter and token plus attention (see
    `model.flops_per_token`), or as 4 with full activation checkpointing. A message takes its bytes divided by `mbit`.
    Local steps that run during a synchronization hide it: none if it is blocking, layer-wise or wait-avoiding, `steps` per
    fragment if overlapped, a round if delayed. Waits within a replica, latency, slow hosts, validation and
    checkpoints are left out.
    """
    train, sync, steps = recipe.train, recipe.sync, recipe.train.total_steps
    again = 4 / 3 if recipe.parallel.activation_checkpointing is True else 1.0
    step = again * train.tokens_per_step * size.flops_per_token / (replicas * shard * rates.flops)

    def seconds(sent: float) -> float:
        return 8 * sent / (rates.mbit * 1e6)

    gradients = seconds(gradient_bytes(recipe, size, replicas))
    if replicas == 1 or sync.period.averages_gradients:
        return TimeEstimate(step, gradients, gradients, steps * (step + gradients))
    if sync.period.is_timed:
        first = warmup_of(sync, LRSchedule.of(recipe))
        message = seconds(per_average(recipe, size, replicas, sync.wire.kind))
        every = max(1.0, sync.period.every / step)
    else:
        rounds = rounds_of(recipe, size, replicas)
        first, every, message = rounds.first, rounds.every, seconds(rounds.bytes)
    exposed = max(0.0, message - sync.schedule.hidden_steps(every) * step)
    waiting = (first * gradients + (steps - first) * exposed / every) / steps
    return TimeEstimate(step, message, waiting, steps * (step + waiting))


def rate_here(recipe: Recipe) -> float:
    """Return the operations per second that a rank on this machine should achieve in training.

    Times matrix products on the device and multiplies their rate by TRAINING_EFFICIENCY. On a CPU, the rate is divided
    by the number of ranks that the recipe starts there, because they share its cores.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = MATMUL_SIZE[device]
    # Random values, because a GPU multiplies constants faster. A separate generator leaves the run's own untouched.
    draw = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(size, size, generator=draw, device=device, dtype=COMPUTE[recipe.parallel.precision])
    seconds = []
    for _ in range(TURNS + 1):
        began = time.perf_counter()
        torch.mm(matrix, matrix)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    sharing = math.prod(recipe.parallel.given_on_cpu) if device == "cpu" else 1
    return TRAINING_EFFICIENCY * 2 * size**3 / statistics.median(seconds[1:]) / sharing
