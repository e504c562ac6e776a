"""Estimates of a run's traffic between replicas, of its duration, and of its waits for the network."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch
from rich.filesize import decimal

from llmtrain.config import Recipe, WireSection
from llmtrain.parallel.connections import connections_for
from llmtrain.parallel.muon import orthogonalization_flops
from llmtrain.parallel.world import World, ranks_per_device
from llmtrain.parallel.wrapping import COMPUTE
from llmtrain.plan.engine_memory import BYTES, moment_values
from llmtrain.plan.model_size import ModelSize
from llmtrain.plan.network_time import FORWARD_SHARE, NetworkLink, block_message, gradient_time, round_time, timed_round
from llmtrain.process_limits import usable_cores
from llmtrain.quantities import counted
from llmtrain.step_counts import local_steps, round_count, warmup_steps

TRAINING_EFFICIENCY = 0.5
"""Ratio of the rate that training reaches to the rate of large matrix products on the same machine. `benchmarks/throughput.py`
measured 0.42 with 6 M parameters and 0.55 with 33 M, on two cores in fp32. GPUs were not measured."""
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the square matrices whose product is timed, by device type."""
TURNS = 5


def per_average(recipe: Recipe, size: ModelSize, replicas: int, wire: WireSection) -> float:
    """Return the bytes that all ranks of one replica together send to average the model over N replicas.

    This is about 2 (N-1)/N x bytes per value x parameters. A rounded value counts with its share of a scale, and each block is
    padded. The wire format fp32 sends values in master precision. With `topk`, a replica sends its largest values to each of
    the N-1 other replicas.
    """
    master, _ = BYTES[recipe.parallel.precision]
    return sum(block_message(values, replicas, wire, value_bytes=master).sent for values in size.block_parameters)


def moment_bytes(recipe: Recipe, size: ModelSize, replicas: int) -> float:
    """Return the bytes that one replica sends per round, on average, to average its optimizer's moments in master precision.
    Muon keeps no second moments of the layers' matrices."""
    moments = recipe.sync.moments
    if moments is None:
        return 0.0
    share_of_second = (moment_values(recipe, size) - size.parameters) / size.parameters
    averages = sum(
        share / every for share, every in ((1.0, moments.first), (share_of_second, moments.second)) if every is not None
    )
    return averages * per_average(recipe, size, replicas, WireSection())


def gradient_bytes(recipe: Recipe, size: ModelSize, replicas: int) -> float:
    """Return the bytes that one replica sends in a synchronous step."""
    wire = recipe.sync.wire
    return per_average(recipe, size, replicas, wire if wire.gradients else WireSection())


def round_bytes(recipe: Recipe, size: ModelSize, replicas: int, shards: int) -> float:
    """Return the bytes that each rank sends over the replica axis in one synchronization (or synchronous step)."""
    if recipe.sync.period.averages_gradients:
        return gradient_bytes(recipe, size, replicas) / shards
    return (per_average(recipe, size, replicas, recipe.sync.wire) + moment_bytes(recipe, size, replicas)) / shards


@dataclass(frozen=True)
class Rounds:
    """Number and length of a run's rounds, and the bytes that one replica sends in each."""

    first: int
    """Synchronous steps before the first round."""
    number: int
    every: float
    """Steps per round, on average."""
    bytes: float
    """Bytes per round."""
    bytes_in_group: float = 0.0
    """Bytes that one replica sends per step for the group average; 0 without groups."""


def rounds_of(recipe: Recipe, size: ModelSize, replicas: int) -> Rounds:
    """Return the rounds of a recipe whose period is a number of local steps, not `every_step` or `seconds`."""
    sync, warmup, number = recipe.sync, warmup_steps(recipe), round_count(recipe)
    every = local_steps(recipe) / number
    per_round = per_average(recipe, size, replicas, sync.wire) + moment_bytes(recipe, size, replicas)
    members = sync.schedule.resolve_group_size(replicas)
    if members is None:
        return Rounds(warmup, number, every, per_round)
    in_group = per_average(recipe, size, members, sync.wire)
    return Rounds(warmup, number, every, per_round + (every - 1) * in_group, in_group)


def traffic(recipe: Recipe, size: ModelSize, replicas: int) -> str:
    """Return one or two lines of text with the bytes that a replica sends per round and per step."""
    if replicas == 1:
        return "none between replicas: there is only one"
    sync = recipe.sync
    gradients = decimal(int(gradient_bytes(recipe, size, replicas)))
    whose = f"from each of {replicas} replicas"
    if sync.period.averages_gradients:
        return f"{gradients} per step {whose} (gradients in every step)"
    if sync.period.is_timed:
        warmup = warmup_steps(recipe)
        per_round = decimal(int(round_bytes(recipe, size, replicas, shards=1)))
        line = f"{per_round} {whose} per round, a round every {sync.period.every:g} s"
        if sync.period.min_steps:
            line += f", of at least {sync.period.min_steps:,} steps of all replicas"
    else:
        rounds = rounds_of(recipe, size, replicas)
        warmup = rounds.first
        in_groups = ""
        if rounds.bytes_in_group:
            members = sync.schedule.resolve_group_size(replicas)
            in_groups = f", {decimal(int(rounds.bytes_in_group))} of it per step among {members}"
        line = (
            f"{decimal(int(rounds.bytes))} {whose} per round{in_groups}, {counted(rounds.number, 'round', ',')} of about "
            f"{rounds.every:.0f} steps: {decimal(int(rounds.bytes / rounds.every))} per step"
        )
    return f"{line}\n{gradients} per step when synchronous" + (f", as in the first {warmup:,} steps" if warmup else "")


def pull_share(recipe: Recipe) -> float:
    """Return the expected fraction of a run's steps that are pulls, which compute no gradient. Each local step is a pull with
    probability `sync.pull.probability`."""
    pull = recipe.sync.pull
    return 0.0 if pull is None else pull.probability * local_steps(recipe) / recipe.train.total_steps


@dataclass(frozen=True)
class HardwareRates:
    """Rates of a rank and of the network between replicas."""

    flops: float
    """Floating-point operations per second that one rank achieves in training."""
    mbit: float
    """Megabits per second from one replica to another, summed over its ranks."""
    latency_ms: float = 0.0
    """One-way latency between two replicas."""
    slow_start: bool = True
    """True if TCP returns to slow start after every pause."""


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated times in seconds; see `estimate_time`."""

    step: float
    """Computation of one step, on average."""
    message: float
    """Transfer of the bytes of one synchronization."""
    waiting: float
    """Average wait for the network per step."""
    run: float
    """Duration of the run."""

    @property
    def computing(self) -> float:
        """Fraction of the time that is not spent waiting for the network."""
        return self.step / (self.step + self.waiting)


def estimate_time(recipe: Recipe, size: ModelSize, replicas: int, shards: int, rates: HardwareRates) -> TimeEstimate:
    """Estimate the times on a `replicas` x `shards` mesh.

    A step costs as much as 3 forward passes, or 4 with full activation checkpointing. Three passes are 6 operations per parameter
    and token plus attention (see `model.flops_per_token`). Muon's iterations are added; the ranks of a replica divide the matrices
    among themselves. A message takes its bytes divided by `mbit`. `network_time` models how long a rank waits for messages, and
    which computation hides them.

    The estimate leaves out waits within a replica, slow hosts, validation, checkpoints, PALSGD's pulls, and optimizer steps that
    ZeRO offloads to the CPU. It counts attention without its causal mask, so steps on long sequences are shorter than estimated.
    Replicas in one process compute one after another on one device, and wait for no network. With `train.batch_shares`, the speeds
    of ranks are assumed to be proportional to their shares, and `rates` are those of the mean rank.
    """
    train, sync, steps = recipe.train, recipe.sync, recipe.train.total_steps
    again = 4 / 3 if recipe.parallel.activation_checkpointing is True else 1.0
    in_turns = recipe.parallel.ranks_per_process
    step = in_turns * again * train.tokens_per_step * size.flops_per_token / (replicas * shards * rates.flops)
    if recipe.optim.kind == "muon":
        step += in_turns * _muon_flops(recipe, size) / (shards * rates.flops)
    average_step = step * (1 - pull_share(recipe))
    if recipe.parallel.in_process:
        return TimeEstimate(average_step, 0.0, 0.0, steps * average_step)

    def seconds(sent: float) -> float:
        return 8 * sent / (rates.mbit * 1e6)

    latency, connections = rates.latency_ms / 1000, recipe.parallel.connections
    if connections == "auto":
        connections = connections_for(2 * latency)
    link = NetworkLink(rates.mbit / shards, latency, connections=connections, slow_start=rates.slow_start)
    values = [-(-parameters // shards) for parameters in size.block_parameters]
    master, _ = BYTES[recipe.parallel.precision]
    is_zero = recipe.parallel.engine == "zero"
    # Gradients are sent in the backward pass of a step's last micro-batch, blocks in the forward pass of its first one.
    micro_batches = max(1, train.global_batch // (train.micro_batch * replicas * shards))
    backward_share = 0.0 if is_zero else (1 - FORWARD_SHARE) / micro_batches
    forward_share = 0.0 if is_zero and recipe.parallel.zero_stage < 3 else FORWARD_SHARE / micro_batches
    gradients = 0.0
    if replicas > 1:
        gradients = gradient_time(sync.wire, values, replicas, step, link, backward_share, master).exposed
    if replicas == 1 or sync.period.averages_gradients:
        message = seconds(gradient_bytes(recipe, size, replicas))
        return TimeEstimate(average_step, message, gradients, steps * (average_step + gradients))
    local_step = step * (1 - (sync.pull.probability if sync.pull is not None else 0.0))
    if sync.period.is_timed:
        first = warmup_steps(recipe)
        message = seconds(round_bytes(recipe, size, replicas, shards=1))
        one = timed_round(sync, values, replicas, local_step, link, forward_share, master)
    else:
        rounds = rounds_of(recipe, size, replicas)
        first, message = rounds.first, seconds(rounds.bytes)
        one = round_time(sync, values, replicas, local_step, rounds.every, link, forward_share, master)
    waiting = (first * gradients + (steps - first) * one.exposed * local_step / one.compute) / steps
    return TimeEstimate(average_step, message, waiting, steps * (average_step + waiting))


def _muon_flops(recipe: Recipe, size: ModelSize) -> int:
    """Return the operations per step with which a replica orthogonalizes its matrices."""
    iterations = recipe.optim.muon.iterations
    return size.layers * sum(orthogonalization_flops(*shape, iterations) for shape in size.layer_matrices)


def rate_here(recipe: Recipe, local_ranks: int | None = None) -> float:
    """Return the operations per second that a rank on this machine should achieve in training.

    Times matrix products on the device and multiplies their rate by TRAINING_EFFICIENCY. The rate is divided among the ranks that
    share the CPU's cores or the GPU. `local_ranks` is the number of ranks on this machine. By default, all ranks of the recipe
    share a CPU, and a rank has a GPU to itself.
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
    ranks = math.prod(recipe.parallel.given_on_cpu) if local_ranks is None else local_ranks
    processes = ranks // recipe.parallel.ranks_per_process
    sharing = 1.0
    if device == "cpu":  # if ranks have fewer threads than there are cores, several can compute without sharing cores
        sharing = max(1.0, processes * torch.get_num_threads() / usable_cores())
    elif local_ranks is not None:
        sharing = ranks_per_device(World(0, processes, 0, processes))
    return TRAINING_EFFICIENCY * 2 * size**3 / statistics.median(seconds[1:]) / sharing
