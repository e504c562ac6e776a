"""Cost of the trainer compared with a hand-written loop, and cost of a synchronization.

    python benchmarks/step_overhead.py                                # one device per replica, on the CPU
    python benchmarks/step_overhead.py --size 33M --family gpt_neo --precision bf16
    python benchmarks/step_overhead.py --replicas 2 --shard 2         # four processes
    python benchmarks/step_overhead.py --replicas 1 --shard 8         # one node of 8 GPUs
    python benchmarks/step_overhead.py --shard 1 2 --zero 1 2 3       # DeepSpeed's stages

Loops over the same batches take turns in one run, by default of one step. With one device per replica, the first row is a plain
loop (`plain_loop` in benchmarks/loops.py): transformers' model and loss, torch's AdamW, nothing else. It runs twice, so that the
ratio of the second row shows how much equal loops differ here. With several shards, there are two bare FSDP2 loops (`bare_loop`),
with and without resharding after forward, and the faster one comes first; the trainer has rows for both policies, too. With
`--zero`, the first row is a bare DeepSpeed loop (`deepspeed_loop`), which runs twice; with one shard, the plain loop follows. The
next rows are the trainer's local step, and the trainer with a synchronization after *every* step, blocking and layer-wise. Ratios
are medians over the turns. The last column is what one synchronization in 128 steps adds. With `--write`, the table goes to
benchmarks/results/step_overhead/, with several shards to step_overhead_sharded/, or with `--zero` to step_overhead_zero/.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from loops import (
    ENDLESS,
    NEVER,
    RECIPE,
    ask,
    bare_loop,
    build,
    deepspeed_loop,
    is_asked,
    opened,
    plain_loop,
    quartiles,
    take_turns,
    timed,
)
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

PERIOD = 128
PLAIN, AGAIN = "plain loop", "plain loop, again"
BARE, GATHERED = "FSDP2 loop, resharded", "FSDP2 loop, kept gathered"
DEEPSPEED = "DeepSpeed loop", "DeepSpeed loop, again"
LOCAL = "trainer, local step"
POLICIES = {"trainer, resharded": "true", "trainer, kept gathered": "false"}
"""Values of `parallel.reshard_after_forward`."""
SYNC = {
    LOCAL: [NEVER, "sync.schedule=blocking"],
    "trainer, blocking sync every step": ["sync.period.every=1", "sync.schedule=blocking"],
    "trainer, layer-wise sync every step": ["sync.period.every=1", "sync.schedule=layerwise"],
}
"""Overrides of each loop, added to the recipe, whose method is EDiT."""
SIZES = {"2.5M": (192, 4, 4, 2048), "8M": (256, 6, 8, 4096), "33M": (512, 8, 8, 8192)}
"""(hidden size, layers, heads, vocabulary)."""
RECIPES = {"llama": RECIPE, "gpt_neo": "recipes/edit_gpt_neo_8m.yaml"}
"""Recipe to change, by family."""
COLUMNS = (
    "loop",
    "ms/step, median",
    "ratio to the first",
    "its quartiles",
    "its 95 % interval",
    "added by one sync in 128 steps",
)
NOTES = """\
Ratios are of turns taken one after another, so that a machine whose speed wanders is no faster for any of them. The interval is
that of the median ratio (order statistics), and blank for fewer than 6 turns."""


def changes_for(family: str, size: str, length: int) -> list[str]:
    """Return a recipe's overrides for a model of a family and size, and for its text and tokenizer."""
    hidden, layers, heads, vocabulary = SIZES[size]
    common = {"hidden_size": hidden, "vocab_size": vocabulary, "max_position_embeddings": max(512, length)}
    of_family: dict[str, dict[str, Any]] = {
        "llama": {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 8 * hidden // 3 // 16 * 16,
        },
        "gpt_neo": {
            "num_layers": layers,
            "num_heads": heads,
            "attention_types": f"[[[global,local],{layers // 2}]]",
            "window_size": 256,
        },
    }
    changes = [f"model.config.{key}={value}" for key, value in (common | of_family[family]).items()]
    return [*changes, "data.source=stdlib", "data.validation=null", f"data.tokenizer=train:{vocabulary}"]


def measure(task: dict[str, Any]) -> dict[str, Any] | None:
    """Run all loops in turn on this rank. The main rank returns the seconds per step by loop and turn."""
    import torch

    from llmtrain.recipe_loader import load_recipe

    replicas, shard, steps, stage = task["replicas"], task["shard"], task["steps"], task["stage"]
    common = [
        *changes_for(task["family"], task["size"], task["length"]),
        f"parallel.replicas={replicas}",
        f"parallel.shards={shard}",
        f"parallel.precision={task['precision']}",
        f"train.global_batch={8 * replicas * shard}",
        "train.micro_batch=8",
        f"train.sequence_length={task['length']}",
        *([f"parallel.zero_stage={stage}", "parallel.engine=zero"] if stage else []),
        *ENDLESS,
    ]
    path = ROOT / RECIPES[task["family"]]
    recipes = {name: load_recipe(path, common + extra) for name, extra in SYNC.items()}
    if replicas == 1:  # there is no other replica to synchronize with
        recipes = {LOCAL: recipes[LOCAL]}
    if shard > 1 and not stage:
        for name, value in POLICIES.items():
            recipes[name] = load_recipe(path, [*common, *SYNC[LOCAL], f"parallel.reshard_after_forward={value}"])
    with opened(recipes[LOCAL], replicas, shard) as (mesh, prepared, scratch):
        trainers = {name: build(recipe, mesh, prepared, scratch, name) for name, recipe in recipes.items()}
        common_arguments = recipes[LOCAL], mesh, prepared.vocab_size, trainers[LOCAL].loader.next
        if stage:
            loops = {name: deepspeed_loop(*common_arguments) for name in DEEPSPEED}
            loops |= {PLAIN: plain_loop(*common_arguments)} if shard == 1 else {}
        elif shard == 1:
            loops = {PLAIN: plain_loop(*common_arguments), AGAIN: plain_loop(*common_arguments)}
        else:
            loops = {BARE: bare_loop(*common_arguments), GATHERED: bare_loop(*common_arguments, resharded=False)}
        # The local step is between the two loops with which it is compared, so that neither has an advantage from its neighbor.
        first, *others = loops
        order = {first: loops[first], LOCAL: trainers[LOCAL].train_step, **{name: loops[name] for name in others}}
        order |= {name: built.train_step for name, built in trainers.items()}
        times = take_turns({name: partial(timed, loop, steps, mesh) for name, loop in order.items()}, task["turns"])
        if not mesh.is_main:
            return None
        fastest_first = sorted(loops, key=lambda name: statistics.median(times[name]) if shard > 1 and not stage else 0)
        seconds = {name: [taken / steps for taken in times[name]] for name in [*fastest_first, *trainers]}
        return {
            "device": mesh.device.type,
            "torch": torch.__version__,
            "seconds": seconds,
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainers[LOCAL].engine.model.parameters()),
        }


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a 95 % confidence interval of the median: the order statistics that a binomial distribution gives. Return None for
    fewer than 6 values, because their complete range is too narrow."""
    ordered, count = sorted(values), len(values)
    below = list(itertools.accumulate(math.comb(count, rank) / 2**count for rank in range(count)))
    outside = sum(chance <= 0.025 for chance in below)  # number of values outside the interval on each side
    return (ordered[outside - 1], ordered[-outside]) if outside else None


def rows_of(seconds: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return the table's rows from seconds per step by loop and turn. Ratios are to the first loop."""
    local, rows, first = statistics.median(seconds[LOCAL]), [], next(iter(seconds))
    for name, series in seconds.items():
        ratios = [a / b for a, b in zip(series, seconds[first], strict=True)]
        low, middle, high = quartiles(ratios)
        interval = interval_of_median(ratios)
        added = 100 * (statistics.median(series) - local) / PERIOD / local
        is_sync = name.startswith("trainer") and name not in (LOCAL, *POLICIES)
        rows.append(
            (
                name,
                f"{1000 * statistics.median(series):.1f}",
                f"{middle:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "",
                f"{added:+.2f} %" if is_sync else "",
            )
        )
    return rows


def title_of(task: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return one line that says what was measured."""
    mesh = f"{task['replicas']} replicas x {task['shard']} shards on {found['device']}"
    model = f"{task['family']} with {found['parameters'] / 1e6:.2f} M parameters in {task['precision']}"
    batch = f"8 sequences of {task['length']} tokens per rank"
    engine = f" under ZeRO-{task['stage']}" if task["stage"] else ""
    return f"{model}, {batch}, {mesh}{engine}, torch {found['torch']}, {task['turns']} turns of {task['steps']} steps"


def main() -> None:
    """Measure each combination, print the tables, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=1)
    arguments.add_argument("--shard", type=int, nargs="+", default=[1])
    arguments.add_argument("--size", nargs="+", choices=SIZES, default=["2.5M"])
    arguments.add_argument("--family", nargs="+", choices=RECIPES, default=["llama"])
    arguments.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    arguments.add_argument("--length", nargs="+", type=int, default=[127], help="tokens per sequence")
    arguments.add_argument("--zero", nargs="+", type=int, choices=(1, 2, 3), default=[0], metavar="STAGE")
    arguments.add_argument("--turns", type=int, default=61)
    arguments.add_argument("--steps", type=int, default=1, help="steps per turn")
    options = arguments.parse_args()
    fixed = {key: getattr(options, key) for key in ("replicas", "turns", "steps")}
    parts = []
    varied = {
        "family": options.family,
        "size": options.size,
        "precision": options.precision,
        "length": options.length,
        "stage": options.zero,
        "shard": options.shard,
    }
    for values in itertools.product(*varied.values()):
        task = dict(zip(varied, values, strict=True)) | fixed
        found = ask(__file__, options.replicas * task["shard"], task)
        rows, title = rows_of(found["seconds"]), title_of(task, found)
        show(title, COLUMNS, rows)
        parts += [f"{title}.", markdown(COLUMNS, rows)]
    if options.write:
        folder = "step_overhead" if options.shard == [1] else "step_overhead_sharded"
        folder = "step_overhead_zero" if options.zero != [0] else folder
        write_page(RESULTS / folder, "The trainer beside a loop written by hand", [*parts, NOTES])


if __name__ == "__main__" and not is_asked(measure):
    main()
