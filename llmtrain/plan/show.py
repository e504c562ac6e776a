"""Preview of a recipe before it runs: resolved keys, the model's size, traffic, memory and time."""

from __future__ import annotations

from dataclasses import fields

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.table import Table

from llmtrain.config import Recipe
from llmtrain.plan.memory import Memory, ModelSize, estimate, size_of
from llmtrain.plan.time_estimate import HardwareRates, estimate_time
from llmtrain.plan.traffic import traffic
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import resolved_yaml

MESHES = ((1, 1), (1, 8), (8, 8))
"""(replicas, shard) of the meshes shown for every recipe."""


def show(recipe: Recipe, console: Console, rates: HardwareRates) -> None:
    """Print the resolved recipe, then its model's size, traffic, memory, and time at these rates.
    Needs no data, GPU or network.

    Raises UserError for a recipe that cannot be trained, or whose vocabulary size is not known without a download.
    """
    check(recipe, None)
    size = size_of(recipe)
    console.print(resolved_yaml(recipe), markup=False, highlight=False, soft_wrap=True)
    console.print(_figures(recipe, size))
    console.print()
    console.print(_memory(recipe, size))
    console.print(_pace(recipe, size, rates))
    console.print(
        f"  with {rates.flops / 1e12:.3g} TFLOP/s of each rank (--tflops) and {rates.mbit:,g} Mbit/s between replicas (--mbit); "
        "waiting: for\n  what comes over the network, a step on average",
        soft_wrap=True,
    )


def _figures(recipe: Recipe, size: ModelSize) -> Table:
    steps, per_step = recipe.train.total_steps, recipe.train.tokens_per_step
    layer, largest = size.block_parameters[1], max(size.block_parameters)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("parameters", f"{size.parameters:,}, {_si(size.embedding_parameters)} of them embedding")
    table.add_row(
        "blocks", f"{len(size.block_parameters)}: {_si(layer)} in a layer, {_si(largest)} in the largest block"
    )
    table.add_row("tokens", f"{_si(steps * per_step)}: {steps:,} steps of {per_step:,}")
    table.add_row("FLOPs", f"{_si(size.flops_per_token)} a token, {size.flops_per_token * steps * per_step:.2e} in all")
    table.add_row("traffic", traffic(recipe, size))
    return table


def _memory(recipe: Recipe, size: ModelSize) -> Table:
    """Return the table of memory: one row per part, one column per mesh."""
    meshes = _meshes(recipe)
    estimates = [estimate(recipe, size, *mesh) for mesh in meshes]
    largest = max(memory.device_total for memory in estimates)
    scale, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")

    table = _by_mesh(f"Estimated {unit} on each GPU, by replicas x shard", meshes)
    for part in (field.name for field in fields(Memory) if field.name != "host"):
        table.add_row(part, *(f"{getattr(memory, part) / scale:,.2f}" for memory in estimates))
    table.add_section()
    table.add_row("total", *(f"{memory.device_total / scale:,.2f}" for memory in estimates), style="bold")
    if any(memory.host_total for memory in estimates):
        table.add_row("in CPU memory", *(f"{memory.host_total / scale:,.2f}" for memory in estimates))
    table.add_row("micro-batches a step", *(_accumulation(recipe, replicas * shard) for replicas, shard in meshes))
    return table


def _pace(recipe: Recipe, size: ModelSize, rates: HardwareRates) -> Table:
    """Return the table of times: one row per part, one column per mesh."""
    meshes = _meshes(recipe)
    paces = [estimate_time(recipe, size, *mesh, rates) for mesh in meshes]
    table = _by_mesh("Estimated seconds, by replicas x shard", meshes)
    for name in ("step", "message", "waiting"):
        table.add_row(name, *(f"{getattr(one, name):,.3g}" for one in paces))
    table.add_section()
    table.add_row("run, hours", *(f"{one.run / 3600:,.3g}" for one in paces), style="bold")
    table.add_row("of it computing", *(f"{one.computing:.1%}" for one in paces))
    return table


def _meshes(recipe: Recipe) -> list[tuple[int, int]]:
    given = tuple(recipe.parallel.given_on_cpu)
    return [*MESHES, *([given] if len(given) == 2 and given not in MESHES else [])]


def _by_mesh(title: str, meshes: list[tuple[int, int]]) -> Table:
    """Return an empty table with one column per mesh."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("")
    for replicas, shard in meshes:
        table.add_column(f"{replicas} x {shard}", justify="right")
    return table


def _accumulation(recipe: Recipe, ranks: int) -> str:
    """Return the micro-batches of one rank per step, or "uneven"."""
    at_once = recipe.train.micro_batch * ranks
    return "uneven" if recipe.train.global_batch % at_once else str(recipe.train.global_batch // at_once)


def _si(number: float) -> str:
    """Return a number with three significant digits and an SI suffix."""
    number = float(f"{number:.3g}")
    unit, suffix = pick_unit_and_suffix(int(number), ["", "k", "M", "G", "T"], 1000)
    return f"{number / unit:.3g}{suffix}"
