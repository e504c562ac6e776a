"""Estimate of the memory that an engine needs for parameters, gradients and optimizer state, on one rank.

`memory.estimate` adds the parts that are the same with every engine, and states all formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.config import Recipe
from llmtrain.parallel.zero_layout import BUCKET, LIVE
from llmtrain.plan.model_size import ModelSize

BYTES = {"bf16": (4, 2), "fp32": (4, 4), "fp64": (8, 8)}
"""Bytes per master value and per value in compute precision, by precision."""


@dataclass(frozen=True)
class EngineMemory:
    """Estimated bytes of an engine; see `estimate` for the formulas."""

    weights: int
    gradients: int
    early_gradients: int
    """Gradients that exist before the last backward pass."""
    late_gradients: int
    """Gradients that exist while that pass computes its last block."""
    optimizer: int
    gathered: int
    gathered_in_forward: int
    buckets: int = 0
    """The part of `gathered` that is allocated for gradients: during backward, or with ZeRO-3 at all times."""
    reduced: int = 0
    """Copies of a bucket of gradients while it is reduced: during backward if there is more than one, otherwise after it."""
    gradients_before_the_last_bucket: int = 0
    """Gradients that exist before the last bucket is reduced, after backward."""
    host: int = 0


def engine_memory(recipe: Recipe, size: ModelSize, replicas: int, shards: int, reshards: bool) -> EngineMemory:
    """Estimate the bytes of the recipe's engine. FSDP2 frees gathered parameters between forward and backward if `reshards`."""
    if recipe.parallel.engine == "zero":
        return _zero(recipe, size, replicas, shards)
    if shards > 1:
        return _fsdp2(recipe, size, replicas, shards, reshards)
    return _single_device(recipe, size, replicas, shards)


def _accumulates(recipe: Recipe, replicas: int, shards: int) -> bool:
    train = recipe.train
    shares = train.batch_shares if len(train.batch_shares) == replicas else (1,) * replicas
    return train.global_batch * max(shares) > train.micro_batch * shards * sum(shares)


def moment_values(recipe: Recipe, size: ModelSize, shards: int = 1) -> int:
    """Return the number of values that the inner optimizer keeps on each rank."""
    part = -(-size.parameters // shards)
    of_muon = size.layers * sum(rows * columns for rows, columns in size.layer_matrices)
    return {"adamw": 2 * part, "muon": 2 * part - of_muon // shards, "sgd": 0}[recipe.optim.kind]


def _fsdp2(recipe: Recipe, size: ModelSize, replicas: int, shards: int, reshards: bool) -> EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    sharded = master * -(-size.parameters // shards)
    largest, second, *_ = sorted(size.block_parameters, reverse=True)
    gathered = largest + second if reshards else size.parameters
    accumulates = _accumulates(recipe, replicas, shards)
    return EngineMemory(
        weights=sharded,
        gradients=sharded,
        early_gradients=sharded if accumulates else 0,
        late_gradients=sharded if accumulates else sharded - master * -(-largest // shards),
        optimizer=moment_values(recipe, size, shards) * master,
        gathered=compute * (gathered + largest) + master * largest,
        gathered_in_forward=compute * gathered,
    )


def _single_device(recipe: Recipe, size: ModelSize, replicas: int, shards: int) -> EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    all_of_it, largest = master * size.parameters, max(size.block_parameters)
    rounded = 0 if compute == master else compute
    accumulates = _accumulates(recipe, replicas, shards)
    return EngineMemory(
        weights=all_of_it + rounded * size.parameters,
        gradients=all_of_it,
        early_gradients=all_of_it if accumulates else 0,
        late_gradients=all_of_it if accumulates else all_of_it - master * largest,
        optimizer=moment_values(recipe, size) * master,
        # Gradients of earlier micro-batches are in `gradients`. Rounded gradients are added to them without another copy.
        gathered=(rounded + (0 if rounded and accumulates else master)) * largest,
        gathered_in_forward=0,
    )


def _zero(recipe: Recipe, size: ModelSize, replicas: int, shards: int) -> EngineMemory:
    master, compute = BYTES[recipe.parallel.precision]
    parallel = recipe.parallel
    sharded = master * -(-size.parameters // shards)
    largest, second, *_ = sorted(size.block_parameters, reverse=True)
    whole = compute * size.parameters
    gathers = parallel.zero_stage == 3
    optimizer = moment_values(recipe, size, shards) * master
    # Masters, gradients and a buffer: in stage 3, the one in which gradients arrive, in stages 1 and 2, one of compute weights.
    offloaded = 2 * sharded + (sharded if gathers else -(-whole // shards)) + optimizer if parallel.zero_offload else 0
    accumulates = _accumulates(recipe, replicas, shards)
    gradients = sharded + (whole if parallel.zero_stage == 1 and accumulates else 0)
    if offloaded and gathers:
        gradients = 0
    ahead = 0 if shards == 1 or recipe.sync.schedule.syncs_in_forward else LIVE
    in_forward = compute * min(size.parameters, largest + max(second, ahead)) if gathers else 0
    buckets = (max(4, compute) if gathers else 2 * compute) * BUCKET
    copies = 4 if gathers else compute + (4 if compute < 4 else 0)
    # Stage 2 keeps this rank's gradients in fp32 from its first bucket on if they are computed in bf16.
    already_there = gathers or (parallel.zero_stage == 2 and (accumulates or compute < master))
    return EngineMemory(
        weights=(0 if offloaded else sharded) + (-(-whole // shards) if gathers else whole),
        gradients=gradients,
        early_gradients=gradients if gathers or accumulates else 0,
        late_gradients=gradients,
        optimizer=0 if offloaded else optimizer,
        gathered=buckets + (in_forward + compute * largest if gathers else 0),
        gathered_in_forward=in_forward + (buckets if gathers else 0),
        buckets=buckets,
        reduced=copies * min(BUCKET, size.parameters),
        gradients_before_the_last_bucket=min(sharded, gradients) if already_there else 0,
        host=offloaded,
    )
