"""Cost of the trainer compared with a bare loop, and of a synchronization.

    python benchmarks/step_overhead.py                      # 2 replicas x 2 shards on the CPU
    python benchmarks/step_overhead.py --replicas 1 --shard 8   # one node of 8 GPUs

Four loops over the same model, data, FSDP2 sharding and AdamW take turns in one run, a few steps each: a bare loop
(`bare_loop` in benchmarks/loops.py, thirty lines), the trainer's local step, and the trainer synchronizing after *every*
step, blocking and layer-wise. Ratios are medians over the turns; the last column is what one synchronization in 128 steps
adds. With `--write` the table goes to benchmarks/results/step_overhead/.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from loops import ENDLESS, MODEL, NEVER, RECIPE, ask, bare_loop, build, is_asked, opened, quartiles, take_turns, timed
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

PERIOD = 128
BARE, LOCAL = "bare loop", "trainer, local step"
SYNC = {
    LOCAL: [NEVER, "sync.schedule=blocking"],
    "trainer, blocking sync every step": ["sync.period.every=1", "sync.schedule=blocking"],
    "trainer, layer-wise sync every step": ["sync.period.every=1", "sync.schedule=layerwise"],
}
"""What each loop adds to the recipe, whose method is EDiT."""
COLUMNS = ("loop", "ms/step, median", "ratio to bare", "its quartiles", f"added by one sync in {PERIOD} steps")
NOTES = """\
Ratios are of turns taken one after another, so that a machine whose speed wanders is no faster for any of them."""


def measure(task: dict[str, Any]) -> dict[str, Any] | None:
    """Run all loops in turn on this rank. The main rank answers with seconds a step by loop and turn."""
    import torch

    from llmtrain.recipe_loader import load_recipe

    replicas, shard, steps = task["replicas"], task["shard"], task["steps"]
    common = [
        *(f"model.config.{key}={value}" for key, value in MODEL.items()),
        f"parallel.replicas={replicas}",
        f"parallel.shards={shard}",
        f"train.global_batch={8 * replicas * shard}",
        "train.micro_batch=8",
        "train.sequence_length=128",
        *ENDLESS,
    ]
    recipes = {name: load_recipe(ROOT / RECIPE, common + extra) for name, extra in SYNC.items()}
    with opened(recipes[LOCAL], replicas, shard) as (mesh, prepared, scratch):
        trainers = {name: build(recipe, mesh, prepared, scratch, name) for name, recipe in recipes.items()}
        loops = {BARE: bare_loop(recipes[LOCAL], mesh, prepared.vocab_size, trainers[LOCAL].loader.next)}
        loops |= {name: built.train_step for name, built in trainers.items()}
        times = take_turns({name: partial(timed, loop, steps, mesh) for name, loop in loops.items()}, task["turns"])
        if not mesh.is_main:
            return None
        seconds = {name: [taken / steps for taken in series] for name, series in times.items()}
        return {"device": mesh.device.type, "torch": torch.__version__, "seconds": seconds}


def rows_of(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """The table, from seconds a step by loop and turn."""
    local, rows = statistics.median(seconds[LOCAL]), []
    for name, series in seconds.items():
        low, middle, high = quartiles([a / b for a, b in zip(series, seconds[BARE], strict=True)])
        added = 100 * (statistics.median(series) - local) / PERIOD / local
        rows.append(
            (
                name,
                f"{1000 * statistics.median(series):.1f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{added:+.2f} %" if name not in (BARE, LOCAL) else "",
            )
        )
    return rows


def main() -> None:
    """Start the ranks, print what they measured."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=2)
    arguments.add_argument("--shard", type=int, default=2)
    arguments.add_argument("--turns", type=int, default=15)
    arguments.add_argument("--steps", type=int, default=8, help="steps a turn")
    options = arguments.parse_args()
    task = {key: getattr(options, key) for key in ("replicas", "shard", "turns", "steps")}
    found = ask(__file__, options.replicas * options.shard, task)
    rows = rows_of(found["seconds"])
    mesh = f"{options.replicas} replicas x {options.shard} shards on {found['device']}"
    title = f"{mesh}, torch {found['torch']}, {options.turns} turns of {options.steps} steps"
    show(title, COLUMNS, rows)
    if options.write:
        table = markdown(COLUMNS, rows)
        write_page(RESULTS / "step_overhead", "The trainer beside a bare loop", [f"{title}.", table, NOTES])


if __name__ == "__main__" and not is_asked(measure):
    main()
