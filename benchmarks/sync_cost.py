"""Cost of one synchronization, by method and wire, compared with the time for its bytes alone.

    python benchmarks/sync_cost.py                              # 2 replicas of one process each; ten minutes on two cores
    python benchmarks/sync_cost.py --methods edit diloco --wires fp32 int8 --shard 4    # eight GPUs
    python benchmarks/sync_cost.py --replicas 1 --wires fp32 --size 1B --offload        # one GPU: arithmetic and copies

For each method, new processes train a small Llama: local steps, and rounds with each wire format, in turns. The added time of a
round is its time minus that of as many local steps in the same turn. It is compared with the time of an all-reduce that sends as
many bytes, also in the same turn. With `--write`, the table goes to benchmarks/results/sync_cost/.

The page there is from before turns began with an untimed round. For `co2` and `streaming_diloco`, its added time lacks one of three
messages, and the all-reduce was made while that message was in flight.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from loops import (
    ENDLESS,
    MODEL,
    NEVER,
    RECIPE,
    RowFailed,
    ask,
    build,
    is_asked,
    on_gpu,
    opened,
    quartiles,
    take_turns,
    timed,
)
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page
from throughput import SIZES

if TYPE_CHECKING:
    from llmtrain.parallel.mesh import Mesh
    from llmtrain.train.trainer import Trainer

LOCAL = "local"
WIRES = ("fp32", "bf16", "int8", "int4")
SMALL = "4M"
MICRO_BATCH, SEQUENCE = 2, 128
"""Settings of the small model. Other sizes have those of `throughput.SIZES`, with micro-batches of one sequence."""
LATE_ROUND = 8
"""Steps per round of methods that spread a round's work over its steps, or whose messages arrive during the steps."""


@dataclass(frozen=True)
class Choice:
    """A method in one of its settings."""

    method: str
    every: int
    overrides: tuple[str, ...] = ()
    own_wire: str | None = None
    """Wire format of a method that allows no other one."""


def _steps(every: int) -> tuple[str, ...]:
    return ("sync.period.kind=steps", f"sync.period.every={every}")


CHOICES = {
    "local_sgd": Choice("local_sgd", 1, _steps(1)),
    "slowmo": Choice("slowmo", 1, _steps(1)),
    "diloco": Choice("diloco", 1, _steps(1)),
    "des_loc": Choice("des_loc", LATE_ROUND, _steps(LATE_ROUND)),
    "gpa": Choice("gpa", 1, _steps(1), own_wire="fp32"),
    "sparseloco": Choice("sparseloco", 1, _steps(1), own_wire="topk"),
    "streaming_diloco": Choice("streaming_diloco", LATE_ROUND, _steps(LATE_ROUND)),
    "co2": Choice("co2", LATE_ROUND, _steps(LATE_ROUND)),
    "wagma": Choice("wagma", LATE_ROUND, _steps(LATE_ROUND)),
    "edit": Choice("edit", 1, _steps(1)),
    "edit, blocking": Choice("edit", 1, (*_steps(1), "sync.schedule=blocking")),
    # shorter than any step, so that all replicas meet after each step
    "a_edit": Choice(
        "a_edit", 1, ("sync.period.kind=seconds", "sync.period.every=0.000001", "sync.period.min_steps=1")
    ),
}
SAME = {"post_local_sgd": "local_sgd", "qsr": "local_sgd", "palsgd": "diloco", "muloco": "diloco", "snoo": "diloco"}
"""Methods that synchronize as another one does, and differ from it only in when they synchronize or in their steps."""
COLUMNS = (
    "method",
    "wire",
    "steps a round",
    "added, ms a round",
    "its quartiles",
    "exposed, ms",
    "of it messages, ms",
    "MB a round",
    "bytes alone, ms",
    "added / alone",
    "state copied, ms",
    "added / copied",
)
NOTES = f"""\
Medians over the turns, of one round, on the main rank. *Added*: its time less that of as many local steps in the same turn.
*Exposed*: what the trainer counts as standing still (`comm/exposed_seconds`); *messages*: waiting for messages to arrive,
the rest is arithmetic. On a GPU both are the time of its stream. Time that is added but not exposed is lost during the
steps: on a CPU's loopback the processors carry the messages, which takes time from the steps in which they arrive. *MB*:
sent by one rank. *Bytes alone*: an all-reduce in fp32 by which a rank sends as many bytes; its sums are
in it. A turn begins with a round that is not timed, so that as many messages arrive in its rounds as are sent in them.

With one replica nothing is sent: what is left are arithmetic and, with offload, copies. *State copied*: every value that the
method keeps (parameters, anchor, momentum) copied once from memory to memory; blank with offload. A round of DiLoCo reads 8
values and writes 4 for each parameter, which are 2 copies of its state; EDiT reads 2 more for its norms.

A round has one step where all of it happens at its end; a longer one ends no differently. `co2`, `streaming_diloco` and
`wagma` have rounds of {LATE_ROUND}; WAGMA averages in every one of these steps.
`post_local_sgd` and `qsr` synchronize as `local_sgd` does, `palsgd`, `muloco` and `snoo` as `diloco`. `a_edit` meets after
every step here, so that its meeting is in the figure. Moments of `des_loc` are not due within a round."""


@dataclass(frozen=True)
class Turn:
    """Measurements of one loop's turn on the main rank: seconds and bytes of one round, or of a local step."""

    seconds: float
    exposed: float = 0.0
    messages: float = 0.0
    bytes: float = 0.0
    alone: float = 0.0
    copied: float = 0.0


def recipe_of(task: Mapping[str, Any], overrides: Sequence[str]):
    """Return the recipe of one loop, given its overrides."""
    from llmtrain.recipe_loader import load_recipe

    replicas, shard, size = task["replicas"], task["shard"], task.get("size", SMALL)
    if size == SMALL:
        batch, model = MICRO_BATCH, [f"model.config.{key}={value}" for key, value in MODEL.items()]
        model.append(f"train.sequence_length={SEQUENCE}")
    else:
        batch, model = 1, SIZES[size]
    common = [
        *model,
        f"parallel.replicas={replicas}",
        f"parallel.shards={shard}",
        f"train.global_batch={batch * replicas * shard}",
        f"train.micro_batch={batch}",
        *ENDLESS,
    ]
    return load_recipe(ROOT / RECIPE, [*common, *overrides, *task["override"]])


def loops_of(task: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the overrides of each loop that takes turns for one method: local steps, then one loop per wire format."""
    choice = CHOICES[task["choice"]]
    offloaded = ["sync.offload=true"] if task["offload"] else []
    wires = {
        wire: [f"sync.method={choice.method}", *choice.overrides, f"sync.wire.kind={wire}", *offloaded]
        for wire in ([choice.own_wire] if choice.own_wire else task["wires"])
    }
    return {LOCAL: ["sync.method=local_sgd", NEVER], **wires}


def measure(task: dict[str, Any]) -> dict[str, Any] | None:
    """Measure one method's turns on this rank. The main rank returns them by loop, and other ranks return None."""
    recipes = {name: recipe_of(task, overrides) for name, overrides in loops_of(task).items()}
    every = CHOICES[task["choice"]].every
    with opened(recipes[LOCAL], task["replicas"], task["shard"]) as (mesh, prepared, scratch):
        trainers = {name: build(recipe, mesh, prepared, scratch, name) for name, recipe in recipes.items()}
        measurements = {LOCAL: partial(local_turn, trainers[LOCAL], every * task["rounds"], mesh)}
        measurements |= {
            name: partial(sync_turn, built, every, task["rounds"], mesh)
            for name, built in trainers.items()
            if name != LOCAL
        }
        turns = take_turns(measurements, task["turns"])
        for name, built in trainers.items():
            if name != LOCAL:
                built.method.finish()
            built.method.close()
        parameters = sum(shard.numel() for block in trainers[LOCAL].engine.blocks for shard in block.shards)
        if not mesh.is_main:
            return None
        found = {name: [asdict(turn) for turn in series] for name, series in turns.items()}
        return {"turns": found, "values": parameters, "device": mesh.device.type}


def local_turn(trainer: Trainer, steps: int, mesh: Mesh) -> Turn:
    """Take `steps` local steps, and return the measurements per step."""
    return Turn(timed(trainer.train_step, steps, mesh) / steps)


def sync_turn(trainer: Trainer, every: int, rounds: int, mesh: Mesh) -> Turn:
    """Take an untimed round and `rounds` timed ones, of `every` steps each. Return the measurements per round, with the time of an
    all-reduce that sends as many bytes.

    A message that arrives a round later is in flight at both ends of the timed rounds. None is in flight during the all-reduce."""
    timed(trainer.train_step, every, mesh)
    before = _counters(trainer)
    seconds = timed(trainer.train_step, every * rounds, mesh)
    exposed, waited, taken, sent = ((now - then) / rounds for now, then in zip(_counters(trainer), before, strict=True))
    trainer.method.shared_state()  # waits for the means in flight
    # A method whose messages are sent by a thread waits for the thread; the others count their waiting among the messages.
    messages = taken + (waited if trainer.recipe.sync.schedule.kind == "wait_avoiding" else 0.0)
    sent = mesh.broadcast_from_main(lambda: sent)
    # Offloaded state would be copied by the CPU, which no method does.
    copied = 0.0 if trainer.recipe.sync.offload else _copied(trainer)
    return Turn(seconds / rounds, exposed, messages, sent, _alone(mesh, sent), copied)


def _counters(trainer: Trainer) -> tuple[float, ...]:
    stats, traffic = trainer.method.stats, trainer.metrics.mesh.replica_comms.traffic
    return trainer.metrics.exposed_seconds, stats.wait_seconds, traffic.waiting.seconds, traffic.bytes


def _alone(mesh: Mesh, sent: float) -> float:
    """Return the seconds of an all-reduce in which a rank sends `sent` bytes, or 0 with one replica."""
    import torch

    if mesh.replicas == 1:
        return 0.0
    share = 2 * (mesh.replicas - 1) / mesh.replicas
    values = torch.ones(max(1, round(sent / share / 4)), device=mesh.replica_comms.device)
    mesh.all_ranks.all_reduce(torch.zeros(1))
    if values.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    mesh.replica_comms.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _copied(trainer: Trainer) -> float:
    """Return the seconds of one copy of this rank's parameters, anchor, momentum and rounding errors into allocated memory."""
    import torch

    from llmtrain.sync.anchors import flat_view

    blocks, anchors = trainer.engine.blocks, trainer.method.block_sync.anchors
    state = [flat_view(block) for block in blocks] + (list(itertools.chain(*anchors.kept.values())) if anchors else [])
    state += trainer.method.block_sync.rounding_errors
    room = [torch.zeros_like(tensor) for tensor in state]
    if state[0].is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for tensor, copy in zip(state, room, strict=True):
        copy.copy_(tensor)
    if state[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def rows_of(name: str, every: int, turns: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Row]:
    """Return one method's rows, from its loops' turns."""
    steps, rows = [turn["seconds"] for turn in turns[LOCAL]], []
    for wire, series in turns.items():
        if wire == LOCAL:
            continue
        low, added, high = quartiles([turn["seconds"] - every * step for turn, step in zip(series, steps, strict=True)])
        middle = {key: statistics.median(turn[key] for turn in series) for key in series[0]}
        rows.append(
            (
                name,
                wire,
                str(every),
                f"{1000 * added:.1f}",
                f"{1000 * low:.1f} to {1000 * high:.1f}",
                f"{1000 * middle['exposed']:.1f}",
                f"{1000 * middle['messages']:.1f}",
                f"{middle['bytes'] / 1e6:.2f}",
                f"{1000 * middle['alone']:.1f}",
                f"{added / middle['alone']:.2f}" if middle["alone"] else "",
                f"{1000 * middle['copied']:.1f}" if middle["copied"] else "",
                f"{added / middle['copied']:.2f}" if middle["copied"] else "",
            )
        )
    return rows


def failed_row(name: str, choice: Choice, wires: Sequence[str], why: RowFailed) -> Row:
    """Return a row without figures for all wires of a method, in which the reason takes the place of the first figure."""
    return (name, choice.own_wire or ", ".join(wires), str(choice.every), why.reason, *[""] * (len(COLUMNS) - 4))


def main() -> None:
    """Measure one method after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--methods", nargs="+", choices=CHOICES, default=list(CHOICES), metavar="METHOD")
    arguments.add_argument("--wires", nargs="+", choices=WIRES, default=list(WIRES), metavar="WIRE")
    arguments.add_argument("--size", choices=(SMALL, *SIZES), default=SMALL)
    arguments.add_argument("--replicas", type=int, default=2, help="a power of two for wagma; 1: nothing is sent")
    arguments.add_argument("--shard", type=int, default=1)
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--rounds", type=int, default=3, help="in a turn")
    arguments.add_argument("--offload", action="store_true", help="on GPUs: each method also with sync.offload")
    arguments.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="for all, laid over the rest")
    options = arguments.parse_args()
    if options.offload and not on_gpu():
        raise SystemExit("--offload is for GPUs, and there is none here: on a CPU nothing is moved; leave it out")
    common = {
        key: getattr(options, key) for key in ("wires", "size", "replicas", "shard", "turns", "rounds", "override")
    }
    rows: list[Row] = []
    about: dict[str, Any] | None = None
    for name in options.methods:
        for offload in (False, True) if options.offload else (False,):
            shown = f"{name}, offloaded" if offload else name
            try:
                found = ask(__file__, options.replicas * options.shard, {"choice": name, "offload": offload, **common})
            except RowFailed as why:  # continue with the other methods
                print(why)
                rows.append(failed_row(shown, CHOICES[name], options.wires, why))
                continue
            about = found
            rows += rows_of(shown, CHOICES[name].every, found["turns"])
    if about is None:
        raise SystemExit("no method could be measured")
    mesh = f"{options.replicas} replicas x {options.shard} shards on {about['device']}"
    title = f"{mesh}, {about['values']:,} parameters a rank, {options.turns} turns of {options.rounds} rounds"
    show(title, COLUMNS, rows, words=2)
    if options.write:
        table = markdown(COLUMNS, rows, words=2)
        write_page(RESULTS / "sync_cost", "What a synchronization costs", [f"{title}.", table, NOTES])


if __name__ == "__main__" and not is_asked(measure):
    main()
