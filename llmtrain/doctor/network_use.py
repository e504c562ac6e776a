"""Prediction of the time that a recipe would wait for the network, given its measured speed, and of changes that would shorten the
waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from llmtrain.config import Recipe
from llmtrain.data.batch_shape import relative_parts
from llmtrain.doctor.finding import Finding, ok, warning
from llmtrain.errors import RecipeError
from llmtrain.plan.model_size import ModelSize
from llmtrain.plan.network_time import PREDICTION_ERROR
from llmtrain.plan.time_estimate import HardwareRates, estimate_time
from llmtrain.quantities import format_duration
from llmtrain.recipe_check import check

WELL_USED = 0.95
"""Minimum fraction of the time spent computing for which no change is advised."""
DELAYS = (1, 2, 3, 5, 8, 12, 20)
"""Steps of delay that are tried for an overlapped schedule."""
UNEVEN = 1.5
"""Minimum ratio of two hosts' rates that counts as more than noise."""
GAIN = 0.01
"""Minimum gain in the fraction of the time spent computing for which a change is named, or a longer delay preferred."""


def slowest_rate(
    nodes: Sequence[str], rates: Sequence[float | None], recipe: Recipe, replicas: int
) -> tuple[float, list[Finding]]:
    """Return the operations per second of the host whose ranks take longest for a step, and a warning if hosts differ much. `nodes`
    names each rank's host. `rates` has the operations per second of one rank per host, and None for other ranks. A rate is divided by
    the replica's part of the batch, relative to the mean: a rank of half the speed and half the work is not slow."""
    parts, shards = relative_parts(recipe.train.batch_shares, replicas), len(nodes) // replicas
    by_host = {
        node: rate / parts[rank // shards]
        for rank, (node, rate) in enumerate(zip(nodes, rates, strict=True))
        if rate is not None
    }
    slow, fast = min(by_host, key=by_host.__getitem__), max(by_host, key=by_host.__getitem__)
    ratio = by_host[fast] / by_host[slow]
    if ratio < UNEVEN:
        return by_host[slow], []
    what = f"ranks on {fast} take a step {ratio:.1f} times as fast as those on {slow}; the slowest is predicted below"
    advice = "steps and rounds wait for the slowest replica; train.batch_shares gives it less work, sync.method=a_edit does not wait"
    return by_host[slow], [warning(what, advice)]


def network_use(recipe: Recipe, size: ModelSize, replicas: int, shards: int, rates: HardwareRates) -> Finding:
    """Return a finding on the fraction of the time that the recipe would spend computing, with choices that would raise it."""
    now = estimate_time(recipe, size, replicas, shards, rates)
    what = (
        f"predicted for this recipe (at most {PREDICTION_ERROR:g} points off in benchmarks with emulated computation): "
        f"a step computes for {format_duration(now.step)} and waits for the network for {format_duration(now.waiting)} "
        f"on average, so {now.computing:.0%} of the time is spent computing"
    )
    if now.computing >= WELL_USED:
        return ok(what)
    if recipe.sync.period.averages_gradients:
        return warning(what, "use rounds of local steps, such as sync.method=edit (docs/methods.md)")
    found = {
        keys: estimate_time(changed, size, replicas, shards, rates).computing
        for keys, changed in changes(recipe, size, replicas, shards, rates)
    }
    better = sorted((share, keys) for keys, share in found.items() if share >= now.computing + GAIN)
    if not better:
        return warning(what, "use longer rounds (sync.period) or a faster network between replicas")
    named = ", ".join(f"{share:.0%} with {keys}" for share, keys in reversed(better))
    return warning(what, f"{named}; these change what is trained (docs/methods.md)")


def changes(
    recipe: Recipe, size: ModelSize, replicas: int, shards: int, rates: HardwareRates
) -> Iterator[tuple[str, Recipe]]:
    """Yield (overrides, changed recipe) for changes with which a recipe with local steps sends less, less often or later.

    Changes that contradict the recipe's other keys are left out.
    """
    sync = recipe.sync
    for kind in ("int8", "int4"):
        if sync.wire.kind in ("fp32", "bf16"):
            yield from _changed(recipe, f"sync.wire={kind}", {"wire": {"kind": kind}}, replicas * shards)
    if sync.period.kind == "steps":
        every = 2 * sync.period.every
        yield from _changed(recipe, f"sync.period.every={every}", {"period": {"every": every}}, replicas * shards)
    if sync.schedule.syncs_all_blocks:
        delayed: list[tuple[float, str, Recipe]] = []
        for steps in DELAYS:
            schedule = {"schedule": {"kind": "overlapped", "steps": steps}}
            words = f"sync.schedule='{{kind: overlapped, steps: {steps}}}'"
            for keys, changed in _changed(recipe, words, schedule, replicas * shards, replaces=True):
                delayed.append((estimate_time(changed, size, replicas, shards, rates).computing, keys, changed))
        most = max((share for share, _, _ in delayed), default=0.0)
        yield from [(keys, changed) for share, keys, changed in delayed if share > most - GAIN][:1]


def _changed(
    recipe: Recipe, keys: str, sync: Mapping[str, Mapping[str, Any]], ranks: int, replaces: bool = False
) -> Iterator[tuple[str, Recipe]]:
    """Yield (`keys`, changed recipe) if the recipe is valid with the changes `sync` in its `sync` section. With `replaces`, a
    changed mapping keeps none of its old keys."""
    data = recipe.model_dump(mode="json")
    for name, values in sync.items():
        data["sync"][name] = dict(values) if replaces else {**data["sync"][name], **values}
    try:
        changed = Recipe.model_validate(data)
        check(changed, ranks)
    except (RecipeError, ValidationError):
        return
    yield keys, changed
