"""Warnings about keys of a recipe that its other keys make unused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from llmtrain.config import Recipe, Section
from llmtrain.step_counts import warmup_steps
from llmtrain.sync.methods import inner_preset


def unused_keys(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key that has another value than its default, and no effect."""
    sync, optim, schedule, parallel = recipe.sync, recipe.optim, recipe.schedule, recipe.parallel
    averages_gradients, moments = sync.period.averages_gradients, sync.moments
    synchronous = f"sync.method={sync.method} averages gradients in every step"
    keeps_no_anchor = f"sync.method={sync.method} keeps no anchor that could be offloaded"
    other_wire = f"sync.wire is {sync.wire.kind}, and only topk has a choice of values"
    no_steps = "the run has no synchronous steps (sync.warmup_steps), which send gradients"
    no_points = f"schedule.kind is {schedule.kind}, and only step has points at which the rate drops"
    no_final = f"schedule.kind is {schedule.kind}, and only cosine and linear have a final rate"
    no_moments = "optim.kind is sgd, which has no moments"
    table: list[tuple[str, bool, str]] = [  # key, whether it is unused, and why
        ("sync.warmup_steps", averages_gradients, synchronous),
        ("sync.warmup_until_lr", averages_gradients, synchronous),
        ("sync.offload", averages_gradients or not sync.needs_anchor, keeps_no_anchor),
        (
            "sync.moments",
            moments is not None and moments.first is None and moments.second is None,
            "neither first nor second: no moments are averaged",
        ),
        ("sync.wire.keep", sync.wire.kind != "topk", other_wire),
        ("sync.wire.values", sync.wire.kind != "topk", other_wire),
        ("sync.wire.feedback_decay", not sync.wire.error_feedback, "sync.wire.error_feedback is false"),
        ("sync.wire.gradients", not averages_gradients and warmup_steps(recipe) == 0, no_steps),
        (
            "train.document_mask",
            recipe.data.packing == "none",
            "with data.packing=none a sequence never has two documents",
        ),
        (
            "parallel.zero_stage",
            parallel.engine != "zero",
            f"parallel.engine is {parallel.engine}, which has no stages",
        ),
        ("optim.muon", optim.kind != "muon" and not inner_preset(sync.method), f"optim.kind is {optim.kind}"),
        ("schedule.decay_at", schedule.kind != "step", no_points),
        ("schedule.decay_factor", schedule.kind != "step", no_points),
        ("schedule.final_ratio", schedule.kind in ("constant", "step"), no_final),
        ("optim.betas", optim.kind == "sgd", no_moments),
        ("optim.eps", optim.kind == "sgd", no_moments),
    ]
    for key, is_unused, why in table:
        if is_unused and is_given(recipe, key):
            yield f"{key} is {_shown(value_of(recipe, key))}, but {why}"
    # Of its three values, only this one needs fsdp2.
    if parallel.reshard_after_forward is False and (parallel.engine == "zero" or parallel.shards == 1):
        yield "parallel.reshard_after_forward is false, which has an effect on fsdp2 with several shards only"


def is_given(recipe: Recipe, key: str) -> bool:
    """Return whether a key has another value than its default. Whether a file names the key says nothing, because the recipe.yaml
    of a run names all keys."""
    path, _, name = key.rpartition(".")
    default = type(value_of(recipe, path)).model_fields[name].get_default(call_default_factory=True)
    return value_of(recipe, key) != default


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), recipe)


def _shown(value: Any) -> str:
    """Return a value as warnings show it."""
    match value:
        case Section():
            return "given"
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case tuple():
            return str(list(value))
    return str(value)
