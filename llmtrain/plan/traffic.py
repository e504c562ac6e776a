"""Bytes that a recipe sends between replicas, computed before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal

from llmtrain.config import Recipe
from llmtrain.lr import LRSchedule
from llmtrain.parallel.wire_format import SCALE_GROUP_SIZE, WireFormat
from llmtrain.plan.memory import BYTES, ModelSize
from llmtrain.sync.period import build_period, warmup_of

TYPICAL_REPLICAS = 8
"""Number of replicas assumed for a recipe that leaves it open."""


def bytes_per_value(recipe: Recipe, kind: str) -> float:
    """Return the bytes per value in the wire format `kind`, including its share of a scale. "fp32" stands for master
    precision."""
    return (
        BYTES[recipe.parallel.precision][0]
        if kind == "fp32"
        else WireFormat(kind).size(SCALE_GROUP_SIZE) / SCALE_GROUP_SIZE
    )


def per_average(recipe: Recipe, size: ModelSize, replicas: int, kind: str) -> float:
    """Return the bytes that all ranks of one replica together send to average the model over N replicas.

    They are 2 (N-1)/N x bytes per value x parameters.
    """
    return 2 * (replicas - 1) / replicas * bytes_per_value(recipe, kind) * size.parameters


@dataclass(frozen=True)
class Rounds:
    """Rounds of a run, and the bytes that one replica sends in them."""

    first: int
    """Synchronous steps before the first round."""
    number: int
    every: float
    """Steps per round, on average."""
    bytes: float
    """Bytes per round."""
    bytes_in_group: float = 0.0
    """Bytes of the group average in one step; 0 without groups."""


def gradient_bytes(recipe: Recipe, size: ModelSize, replicas: int) -> float:
    """Return the bytes that one replica sends in a synchronous step."""
    wire = recipe.sync.wire
    return per_average(recipe, size, replicas, wire.kind if wire.gradients else "fp32")


def rounds_of(recipe: Recipe, size: ModelSize, replicas: int) -> Rounds:
    """Return the rounds of a recipe whose period counts local steps, so neither `every_step` nor `seconds`."""
    sync, steps = recipe.sync, recipe.train.total_steps
    rates = LRSchedule.of(recipe)
    warmup = warmup_of(sync, rates)
    period = build_period(sync.period, warmup, rates)
    number = sum(period.ends_round(step) for step in range(warmup + 1, steps + 1)) + (not period.ends_round(steps))
    every = (steps - warmup) / number
    per_round = per_average(recipe, size, replicas, sync.wire.kind)
    members = sync.schedule.resolve_group_size(replicas)
    if members is None:
        return Rounds(warmup, number, every, per_round)
    in_group = per_average(recipe, size, members, sync.wire.kind)
    return Rounds(warmup, number, every, per_round + (every - 1) * in_group, in_group)


def traffic(recipe: Recipe, size: ModelSize) -> str:
    """Return one or two lines of text with the bytes per round and per step."""
    replicas = TYPICAL_REPLICAS if recipe.parallel.replicas == "auto" else recipe.parallel.replicas
    if replicas == 1:
        return "none between replicas: there is one"
    sync = recipe.sync
    gradients = decimal(int(gradient_bytes(recipe, size, replicas)))
    whose = f"from each of {replicas} replicas"
    if sync.period.averages_gradients:
        return f"{gradients} a step {whose} (gradients in every step)"
    if sync.period.is_timed:
        warmup = warmup_of(sync, LRSchedule.of(recipe))
        per_round = decimal(int(per_average(recipe, size, replicas, sync.wire.kind)))
        line = f"{per_round} {whose} a round, a round in {sync.period.every:g} s"
    else:
        rounds = rounds_of(recipe, size, replicas)
        warmup = rounds.first
        in_groups = ""
        if rounds.bytes_in_group:
            members = sync.schedule.resolve_group_size(replicas)
            in_groups = f", {decimal(int(rounds.bytes_in_group))} of it in a step among {members}"
        line = (
            f"{decimal(int(rounds.bytes))} {whose} a round{in_groups}, {rounds.number:,} rounds of about "
            f"{rounds.every:.0f} steps: {decimal(int(rounds.bytes / rounds.every))} a step"
        )
    return f"{line}\n{gradients} a step when synchronous" + (f", as in the first {warmup:,} steps" if warmup else "")
