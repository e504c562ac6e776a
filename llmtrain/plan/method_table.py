"""Table of all methods for one recipe and network: their rounds and schedules, and how long they would wait for the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from llmtrain.config import Recipe, SyncSection
from llmtrain.errors import RecipeError, UserError
from llmtrain.plan.hardware import Hardware
from llmtrain.plan.model_size import size_of
from llmtrain.plan.show import footnote
from llmtrain.plan.time_estimate import TimeEstimate, estimate_time
from llmtrain.quantities import format_duration
from llmtrain.recipe_check import check
from llmtrain.sync.methods import METHODS

TYPICAL_MESH = (4, 1)
"""Numbers of replicas and shards that are assumed where the recipe leaves them open."""


@dataclass(frozen=True)
class MethodTimes:
    """Estimates for the methods that a recipe allows, and the reasons why it does not allow the others."""

    mesh: tuple[int, int]
    estimates: dict[str, tuple[SyncSection, TimeEstimate]]
    refused: dict[str, str]


def method_times(recipe: Recipe, with_method: Callable[[str], Recipe], hardware: Hardware) -> MethodTimes:
    """Estimate the times of `recipe` with each method. `with_method` returns the recipe with the preset of another method.

    Raises UserError if the recipe has one replica or trains all replicas in one process, because nothing then waits for a network.
    """
    mesh = _mesh(recipe, hardware.on_gpu)
    found = MethodTimes(mesh, {}, {})
    for method in METHODS:
        try:
            changed = recipe if method == recipe.sync.method else with_method(method)
            check(changed, mesh[0] * mesh[1])
        except RecipeError as refusal:
            found.refused[method] = str(refusal)
            continue
        found.estimates[method] = changed.sync, estimate_time(changed, size_of(changed), *mesh, hardware.rates)
    return found


def show_methods(recipe: Recipe, with_method: Callable[[str], Recipe], console: Console, hardware: Hardware) -> None:
    """Print the table of `method_times`. The recipe's own method is in bold."""
    found = method_times(recipe, with_method, hardware)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("method", "rounds", "schedule", "wire"):
        table.add_column(column, no_wrap=True)
    for column in ("waiting", "computing"):
        table.add_column(column, justify="right", no_wrap=True)
    for method, (sync, time) in found.estimates.items():
        times = (format_duration(time.waiting), f"{time.computing:.1%}")
        style = "bold" if method == recipe.sync.method else None
        table.add_row(method, _rounds(sync), _schedule(sync), sync.wire.kind, *times, style=style)
    replicas, shards = found.mesh
    console.print(f"This recipe with each method: {replicas} x {shards} (replicas x shards), {hardware.device}")
    console.print(table)
    for method, reason in found.refused.items():
        console.print(f"  {method}: {reason}", soft_wrap=True)
    console.print(
        f"{footnote(hardware)}\n  A method's preset replaces the recipe's reduction, outer optimizer and schedule; the recipe's "
        "period, warm-up and wire stay where\n  the method has none of its own. docs/results.md compares their losses.\n  "
        f"One replica alone would train as fast as {replicas} replicas that compute for {1 / replicas:.1%} of the time.",
        soft_wrap=True,
    )


def _mesh(recipe: Recipe, on_gpu: bool) -> tuple[int, int]:
    """Return the recipe's mesh, with numbers from TYPICAL_MESH where it leaves them open."""
    parallel = recipe.parallel
    if parallel.in_process:
        raise UserError("parallel.in_process=true trains all replicas in one process, so none waits for a network")
    given = (parallel.replicas, parallel.shards)
    if not on_gpu and len(parallel.given_on_cpu) == 2:
        given = parallel.given_on_cpu
    replicas, shards = (typical if n == "auto" else n for n, typical in zip(given, TYPICAL_MESH, strict=True))
    if replicas == 1:
        raise UserError("parallel.replicas is 1, so nothing is sent between replicas; give parallel.replicas=4")
    return replicas, shards


def _rounds(sync: SyncSection) -> str:
    period = sync.period
    if period.averages_gradients:
        return "every step"
    if period.is_timed:
        return format_duration(period.every)
    return f"{'from ' if period.follows_lr else ''}{period.min_length} steps"


def _schedule(sync: SyncSection) -> str:
    steps = getattr(sync.schedule, "steps", None)
    return sync.schedule.kind if steps is None else f"{sync.schedule.kind}, {steps}"
