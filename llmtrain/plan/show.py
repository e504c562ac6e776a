"""Preview of a recipe before it runs: resolved keys, the model's size, traffic, memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from llmtrain.config import Recipe
from llmtrain.data.batch_shape import batch_unit
from llmtrain.plan.cards import GpuCard
from llmtrain.plan.hardware import Hardware
from llmtrain.plan.memory import Memory, estimate, reshards
from llmtrain.plan.mesh_plan import MEMORY_HEADROOM
from llmtrain.plan.model_size import ModelSize, size_of
from llmtrain.plan.network_time import PREDICTION_ERROR
from llmtrain.plan.time_estimate import estimate_time, pull_share, traffic
from llmtrain.quantities import GIB, YEAR, format_duration, format_si
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import resolved_yaml

MESHES = ((1, 1), (1, 8), (8, 1), (8, 8))
"""(replicas, shards) of the meshes shown for a recipe that leaves its mesh open."""


def show_plan(recipe: Recipe, console: Console, hardware: Hardware) -> None:
    """Print the resolved recipe, then its model's size, its traffic and memory, and its time on this hardware. Needs no
    data, GPU or network.

    Raises UserError for a recipe that cannot be trained, or whose vocabulary size is not known without a download.
    """
    check(recipe, None)
    size = size_of(recipe)
    meshes = _meshes(recipe, hardware.on_gpu)
    console.print(resolved_yaml(recipe), markup=False, highlight=False, soft_wrap=True)
    console.print(_figures(recipe, size, replicas=meshes[-1][0]))
    console.print()
    console.print(_memory(recipe, size, meshes, hardware))
    # A rate measured on this CPU says nothing about meshes with more ranks than this CPU would run.
    is_open = hardware.is_this_cpu and len(meshes) > 1
    console.print(_pace(recipe, size, meshes[:1] if is_open else meshes, hardware))
    console.print(footnote(hardware), soft_wrap=True)


def footnote(hardware: Hardware) -> str:
    """Return lines that say what the estimates assume and how exact they are."""
    rates = hardware.rates
    return (
        f"  with {rates.flops / 1e12:.3g} TFLOP/s of {hardware.device} ({hardware.source}) and {rates.mbit:,g} Mbit/s between "
        f"replicas (--mbit),\n  {rates.latency_ms:g} ms apart, one way (--latency-ms); waiting: for messages, per step on average;\n"
        f"  computing: at most {PREDICTION_ERROR:g} points off in benchmarks over gloo with emulated steps (docs/network.md)"
    )


def _figures(recipe: Recipe, size: ModelSize, replicas: int) -> Table:
    steps, per_step = recipe.train.total_steps, recipe.train.tokens_per_step
    pull, pulls = recipe.sync.pull, pull_share(recipe)
    keeps_batches = pull is not None and pull.batch == "keep"
    computed = (1 - pulls) * steps * per_step
    layer, largest = size.block_parameters[1], max(size.block_parameters)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("parameters", f"{size.parameters:,}, {format_si(size.embedding_parameters)} of them embedding")
    table.add_row(
        "blocks",
        f"{len(size.block_parameters)}: {format_si(layer)} in a layer, {format_si(largest)} in the largest block",
    )
    at_most = recipe.data.at_most
    taken = computed if keeps_batches else steps * per_step
    pulled = f", none in pulls (about {pulls:.0%} of steps)" if pulls and keeps_batches else ""
    table.add_row("tokens", f"{at_most}{format_si(taken)}: {steps:,} steps of {at_most}{per_step:,}{pulled}")
    table.add_row(
        "FLOPs", f"{format_si(size.flops_per_token)} a token, {at_most}{size.flops_per_token * computed:.2e} in all"
    )
    table.add_row("traffic", traffic(recipe, size, replicas))
    return table


def _memory(recipe: Recipe, size: ModelSize, meshes: Sequence[tuple[int, int]], hardware: Hardware) -> Group:
    """Return the table of memory: one row per part, one column per mesh."""
    estimates = [estimate(recipe, size, *mesh) for mesh in meshes]
    totals = [memory.total(hardware.on_gpu) for memory in estimates]
    scale, unit = (GIB, "GiB") if max(totals) >= GIB else (2**20, "MiB")
    device = hardware.device if hardware.on_gpu or len(meshes) == 1 else "each rank"
    table = _by_mesh(meshes)
    for part in (field.name for field in fields(Memory) if not field.name.startswith("host")):
        label = "not all at once" if part == "non_coincident" else part
        table.add_row(label, *(f"{getattr(memory, part) / scale:,.2f}" for memory in estimates))
    is_offloaded = any(memory.host for memory in estimates)
    if is_offloaded and not hardware.on_gpu:
        table.add_row("offloaded", *(f"{memory.host / scale:,.2f}" for memory in estimates))
    if any(memory.host_models for memory in estimates) and not hardware.on_gpu:
        table.add_row("newest models", *(f"{memory.host_models / scale:,.2f}" for memory in estimates))
    if any(memory.copies_on_cpu for memory in estimates) and not hardware.on_gpu:
        table.add_row("copies", *(f"{memory.copies_on_cpu / scale:,.2f}" for memory in estimates))
    table.add_section()
    table.add_row("total", *(f"{total / scale:,.2f}" for total in totals), style="bold")
    if hardware.on_gpu and any(memory.host_total for memory in estimates):
        table.add_row("in CPU memory", *(f"{memory.host_total / scale:,.2f}" for memory in estimates))
    if hardware.card is not None:
        table.add_row(f"fits in {hardware.card.gigabytes} GB", *(_fits(total, hardware.card) for total in totals))
    if recipe.parallel.engine == "fsdp2" and any(shards > 1 for _, shards in meshes):
        table.add_row("stay gathered", *(_stay_gathered(recipe, size, *mesh) for mesh in meshes))
    table.add_row("micro-batches per step", *(_accumulation(recipe, *mesh) for mesh in meshes))
    return _titled(f"Estimated {unit} on {device}, by replicas x shards", table)


def _fits(needed: float, card: GpuCard) -> str:
    share = needed / (card.usable * card.gigabytes * GIB)
    return "yes" if share <= MEMORY_HEADROOM else "tight" if share <= 1 else "no"


def _stay_gathered(recipe: Recipe, size: ModelSize, replicas: int, shards: int) -> str:
    """Return whether parameters stay gathered between forward and backward, as a cell of the table."""
    return "" if shards == 1 else "no" if reshards(recipe, size, replicas, shards) else "yes"


def _pace(recipe: Recipe, size: ModelSize, meshes: Sequence[tuple[int, int]], hardware: Hardware) -> Group:
    """Return the table of times: one row per part, one column per mesh."""
    paces = [estimate_time(recipe, size, *mesh, hardware.rates) for mesh in meshes]
    table = _by_mesh(meshes)
    table.add_row("step", *(format_duration(one.step) for one in paces))
    table.add_row("message", *(format_duration(one.message) for one in paces))
    table.add_row("message in steps", *(f"{one.message / one.step:.2g}" for one in paces))
    table.add_row("waiting", *(format_duration(one.waiting) for one in paces))
    table.add_section()
    is_too_long = hardware.is_this_cpu and any(one.run > YEAR for one in paces)
    advice = " on this machine; give --gpu or --tflops" if is_too_long else ""
    table.add_row("run", *(f"{format_duration(one.run)}{advice}" for one in paces), style="bold")
    table.add_row("of it computing", *(f"{one.computing:.1%}" for one in paces))
    # Ranks that share this CPU would be faster alone, and replicas in one process have no devices of their own.
    if any(replicas > 1 for replicas, _ in meshes) and not (hardware.is_this_cpu or recipe.parallel.in_process):
        alone = [estimate_time(recipe, size, 1, shards, hardware.rates) for _, shards in meshes]
        table.add_row("run, one replica alone", *(format_duration(one.run) for one in alone))
    table.add_section()
    total = recipe.train.total_steps
    for name, every in (("checkpoints", recipe.checkpoint.every), ("log lines", recipe.log.every)):
        steps = min(every or total, total)
        table.add_row(f"between {name}", *(format_duration(steps * (one.step + one.waiting)) for one in paces))
    speeds = ", on average over unequal replicas" if recipe.train.batch_shares else ""
    return _titled(f"Estimated time with {hardware.device}{speeds}, by replicas x shards", table)


def _meshes(recipe: Recipe, on_gpu: bool) -> list[tuple[int, int]]:
    """Return the recipe's own mesh if it names one. Otherwise, return typical meshes, with the number of replicas or shards
    that the recipe gives."""
    parallel = recipe.parallel
    replicas, shards = parallel.replicas, parallel.shards
    if (parallel.in_process or not on_gpu) and len(parallel.given_on_cpu) == 2:
        replicas, shards = parallel.given_on_cpu
    return list(
        dict.fromkeys((r if replicas == "auto" else replicas, s if shards == "auto" else shards) for r, s in MESHES)
    )


def _by_mesh(meshes: Sequence[tuple[int, int]]) -> Table:
    """Return an empty table with one column per mesh."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for replicas, shards in meshes:
        table.add_column(f"{replicas} x {shards}", justify="right")
    return table


def _titled(title: str, table: Table) -> Group:
    """Return a table below a title. rich would wrap a table's own title to the width of the table."""
    return Group(Text(title, style="italic"), table)


def _accumulation(recipe: Recipe, replicas: int, shards: int) -> str:
    """Return the number of micro-batches per rank and step, one number per replica if replicas have their own shares,
    or "uneven" if the global batch can't be divided that way."""
    train = recipe.train
    shares = train.batch_shares if len(train.batch_shares) == replicas else ()
    if train.global_batch % batch_unit(train.micro_batch, replicas * shards, shares):
        return "uneven"
    at_once = train.micro_batch * shards * (sum(shares) or replicas)
    return ", ".join(str(train.global_batch * share // at_once) for share in shares or (1,))
