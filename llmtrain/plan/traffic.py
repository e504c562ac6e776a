"""What a recipe sends between replicas, before it is run."""

from __future__ import annotations

from rich.filesize import decimal

from llmtrain.config import Butterfly, EverySeconds, EveryStep, Recipe
from llmtrain.lr import LearningRates
from llmtrain.parallel.wire import BLOCK, Wire
from llmtrain.plan.memory import BYTES, ModelSize
from llmtrain.sync.butterfly import group_size
from llmtrain.sync.period import build_period, warmup_of

TYPICAL_REPLICAS = 8
"""For the traffic of a recipe that leaves their number open."""


def bytes_per_value(recipe: Recipe, kind: str) -> float:
    """Of one value on a wire of that kind, its share of a scale included; fp32 is master precision."""
    return BYTES[recipe.parallel.precision][0] if kind == "fp32" else Wire(kind).size(BLOCK) / BLOCK


def per_average(recipe: Recipe, size: ModelSize, replicas: int, kind: str) -> float:
    """Bytes one replica, all its ranks together, sends to average the whole model over so many: 2 (N-1)/N x bytes of a
    value x parameters."""
    return 2 * (replicas - 1) / replicas * bytes_per_value(recipe, kind) * size.parameters


def traffic(recipe: Recipe, size: ModelSize) -> str:
    """A line or two for people: bytes a round and a step."""
    replicas = TYPICAL_REPLICAS if recipe.parallel.replicas == "auto" else recipe.parallel.replicas
    if replicas == 1:
        return "none between replicas: there is one"
    sync = recipe.sync
    gradients = per_average(recipe, size, replicas, sync.wire.kind if sync.wire.gradients else "fp32")
    whose = f"from each of {replicas} replicas"
    if isinstance(sync.period, EveryStep):
        return f"{decimal(int(gradients))} a step {whose} (gradients in every step)"
    warmup = warmup_of(sync, LearningRates.of(recipe))
    lines = _rounds(recipe, size, replicas, warmup, whose)
    first = f", as in the first {warmup:,} steps" if warmup else ""
    return f"{lines}\n{decimal(int(gradients))} a step when synchronous{first}"


def _rounds(recipe: Recipe, size: ModelSize, replicas: int, warmup: int, whose: str) -> str:
    sync, steps = recipe.sync, recipe.train.total_steps
    per_round = per_average(recipe, size, replicas, sync.wire.kind)
    if isinstance(sync.period, EverySeconds):
        return f"{decimal(int(per_round))} {whose} a round, a round in {sync.period.every:g} s"
    period = build_period(sync.period, warmup, LearningRates.of(recipe))
    rounds = sum(period.ends_round(step) for step in range(warmup + 1, steps + 1)) + (not period.ends_round(steps))
    every = (steps - warmup) / rounds
    how_many = f"{rounds:,} rounds of about {every:.0f} steps"
    in_groups = ""
    if isinstance(sync.group, Butterfly):
        members = group_size(replicas, sync.group.size)
        in_group = per_average(recipe, size, members, sync.wire.kind)
        per_round += (every - 1) * in_group
        in_groups = f", {decimal(int(in_group))} of it in a step among {members}"
    return f"{decimal(int(per_round))} {whose} a round{in_groups}, {how_many}: {decimal(int(per_round / every))} a step"
