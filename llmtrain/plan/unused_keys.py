"""Warnings about keys of a recipe that have no effect because of its other keys."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from llmtrain.config import Recipe, Section
from llmtrain.config.data import HUB
from llmtrain.step_counts import warmup_steps
from llmtrain.sync.methods import inner_preset


def unused_keys(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key that differs from its default but has no effect."""
    sync, optim, schedule, parallel = recipe.sync, recipe.optim, recipe.schedule, recipe.parallel
    averages, only = sync.period.averages_gradients, f"schedule.kind is {schedule.kind}, and only"
    is_empty = sync.moments is not None and sync.moments.first is None and sync.moments.second is None
    sends_none = not averages and warmup_steps(recipe) == 0
    is_other_optimizer = optim.kind != "muon" and not inner_preset(sync.method)
    # Texts of `eval.sets` use the keys of `data`.
    texts = recipe.data.texts().values() if recipe.data.is_list and not recipe.eval.sets else ()
    shared = ("subset", "split", "text_key", "separator", "validation", "validation_fraction")
    own = [key for key in shared if texts and all(getattr(text, key) != getattr(recipe.data, key) for text in texts)]
    table: list[tuple[str, bool, str]] = [  # keys, whether they are unused, and why
        (
            "sync.warmup_steps sync.warmup_until_lr",
            averages,
            f"sync.method={sync.method} averages gradients in every step",
        ),
        (
            "sync.offload",
            averages or not sync.needs_anchor,
            f"sync.method={sync.method} keeps no anchor that could be offloaded",
        ),
        ("sync.moments", is_empty, "neither first nor second: no moments are averaged"),
        (
            "sync.wire.keep sync.wire.values",
            sync.wire.kind != "topk",
            f"sync.wire is {sync.wire.kind}, and only topk has a choice of values",
        ),
        ("sync.wire.feedback_decay", not sync.wire.error_feedback, "sync.wire.error_feedback is false"),
        (
            "sync.wire.gradients",
            sends_none,
            "the run has no synchronous steps (sync.warmup_steps), which send gradients",
        ),
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
        ("optim.muon", is_other_optimizer, f"optim.kind is {optim.kind}"),
        (
            "schedule.decay_at schedule.decay_factor",
            schedule.kind != "step",
            f"{only} step has points at which the rate drops",
        ),
        (
            "schedule.decay_fraction schedule.decay_shape",
            schedule.kind != "wsd",
            f"{only} wsd keeps the peak until a decay",
        ),
        (
            "schedule.final_ratio",
            schedule.kind in ("constant", "step"),
            f"{only} cosine, linear and wsd have a final rate",
        ),
        (" ".join(f"data.{key}" for key in own), bool(own), "each text of the list has its own"),
        (
            "data.subset data.split",
            not any(text.source.startswith(HUB) for text in recipe.data.texts().values()),
            "data.source is not on the hub: all of its files are read, whatever their split",
        ),
        ("optim.betas optim.eps", optim.kind == "sgd", "optim.kind is sgd, which has no moments"),
    ]
    for keys, is_unused, why in table:
        for key in keys.split() if is_unused else ():
            if is_given(recipe, key):
                yield f"{key} is {_shown(value_of(recipe, key))}, but {why}"
    # Of its three values, only this one needs fsdp2.
    if parallel.reshard_after_forward is False and (parallel.engine == "zero" or parallel.shards == 1):
        yield "parallel.reshard_after_forward is false, which has an effect on fsdp2 with several shards only"


def is_given(recipe: Recipe, key: str) -> bool:
    """Return whether the value of a key differs from its default. Looking for the key in the recipe's file would not do, because a
    run's recipe.yaml names all keys."""
    path, _, name = key.rpartition(".")
    default = type(value_of(recipe, path)).model_fields[name].get_default(call_default_factory=True)
    return value_of(recipe, key) != default


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a dotted key."""
    return reduce(getattr, key.split("."), recipe)


def _shown(value: Any) -> str:
    """Return a value as warnings show it."""
    if isinstance(value, Section):
        return "given"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return str(value) if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"
