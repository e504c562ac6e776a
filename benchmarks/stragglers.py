"""Cost of a slow replica for the others, with methods that wait for it and methods that do not.

    python benchmarks/stragglers.py                                   # no data, no GPU; about fifteen minutes
    python benchmarks/stragglers.py --turns 1 --slow 4 --step-ms 50

Four processes on this machine run the real methods on a stand-in for a model: a step is a sleep and an update drawn in advance,
so that it takes the given time, however few cores the machine has. One replica is slow, or a different one in each step, drawn
from a common seed. Speeds are those of complete rounds after the first one, relative to the same steps of the stand-in without a
method ("alone"), measured in the same turn. With `--write`, the table goes to benchmarks/results/stragglers/.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from table import RESULTS, Row, markdown, parser, show, write_page

if TYPE_CHECKING:
    import torch.distributed as dist

    from llmtrain.config import SyncSection
    from llmtrain.parallel.comms import Comms

ROUND = 128
"""Steps per round of EDiT (its preset). A-EDiT's rounds have the seconds that a fast replica takes for as many."""
BLOCKS = 4
TIMEOUT = timedelta(seconds=120)
NAMES = ("synchronous", "edit", "a_edit", "wagma_10", "wagma_50")
COLUMNS = (
    "slow replica",
    "method",
    "fast, steps/s",
    "slow, steps/s",
    "all, of the sum alone",
    "min to max",
    "fast between global averages, of alone",
    "min to max",
    "of nobody slow",
    "late",
)
NOTES = """\
Medians over the turns. *Fast* and *slow* are steps a second of one such replica (*fast*: the median of them; where
another one is slow in every step, all count as fast). *All, of the sum alone*: steps a second of all replicas over the
sum of what they do alone. *Between global averages*: WAGMA's steps but the one of a round in which all replicas wait for
each other, which is what a slow replica costs by design and is in the columns before; relative to the same steps alone,
and to WAGMA where nobody is slow, which leaves out what a group average costs anyway. *Late*: the share of steps at whose
group average a replica was late; a replica that is a moment behind the first one counts as late.

`synchronous` averages a gradient of the model's size in every step. `edit` and `a_edit` are the presets without warm-up,
with rounds of 128 steps and of the time that a fast replica takes for 128. The shorter a round, the more it shows that
A-EDiT's replicas wait, at each meeting, for the step that a slow one has begun. `wagma_10` and `wagma_50` have a global average every 10
and 50 steps."""


@dataclass(frozen=True)
class Settings:
    """Choices of the command line."""

    step_seconds: float = 0.02
    seconds: float = 3.0
    """Minimum seconds of a measurement, which has at least two rounds."""
    turns: int = 3
    factors: tuple[float, ...] = (3.0, 5.0)
    values: int = 20_000
    methods: tuple[str, ...] = NAMES


@dataclass(frozen=True)
class Scenario:
    """Choice of the slow replica, whose steps take `factor` times as long: one replica, a different one in each step, or none."""

    factor: float = 1.0
    slow: int | None = None

    @property
    def name(self) -> str:
        if self.factor == 1:
            return "none"
        return f"one, {self.factor:g}x" if self.slow is not None else f"random, {self.factor:g}x"

    def steps_worth(self, replica: int, step: int, replicas: int) -> float:
        """Return the time that the replica takes for this step, in steps of a fast replica."""
        slow = self.slow if self.slow is not None else random.Random(f"slow in {step}").randrange(replicas)
        return self.factor if replica == slow else 1.0

    def is_fast(self, replica: int) -> bool:
        """Return whether the replica is as fast as all others, or as all but the slow one."""
        return self.factor == 1 or replica != self.slow

    def slowest(self, steps: int, replicas: int) -> float:
        """Return the slowest replica's mean time per step over the first `steps` steps, in steps of a fast replica."""
        return max(sum(self.steps_worth(n, i, replicas) for i in range(1, steps + 1)) for n in range(replicas)) / steps


class StandIn:
    """Stand-in for an engine, as methods see it. Its forward calls hooks and sleeps. Its updates are drawn in advance."""

    def __init__(self, replica: Comms, values: int, seconds: Callable[[int], float]):
        import torch

        from llmtrain.parallel.engine import Block

        drawn = torch.Generator().manual_seed(replica.rank)
        self.replica, self.seconds = replica, seconds
        self.blocks = [Block(f"block {i}", [torch.zeros(values)]) for i in range(BLOCKS)]
        self.average_gradients = False
        self._updates = [torch.randn(values, generator=drawn) for _ in range(8)]
        self._hooks: list[Callable[[int], None]] = []

    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        """Register a hook of the method, which every forward calls."""
        self._hooks.append(hook)

    def parameters_changed(self, block: object) -> None:
        """Do nothing, because forward computes nothing from parameters."""

    def step(self, step: int, lr: float) -> None:
        """Take one step of this replica, and average its gradients if the method asks for it."""
        for index in range(len(self.blocks)):
            for hook in self._hooks:
                hook(index)
            time.sleep(self.seconds(step) / len(self.blocks))
        updates = [self._updates[(step + index) % 8] for index in range(len(self.blocks))]
        if self.average_gradients:
            sums = [self.replica.start_all_reduce(update / self.replica.size) for update in updates]
            updates = [pending.wait() for pending in sums]
        for block, update in zip(self.blocks, updates, strict=True):
            block.shards[0].add_(update, alpha=lr)


@dataclass(frozen=True)
class Speed:
    """Steps and seconds of one replica in the measured rounds."""

    steps: float = 0.0
    seconds: float = 0.0
    worth: float = 0.0
    """Length of these steps, in steps of a fast replica."""
    between_steps: float = 0.0
    """Steps without the last one of each round. The next two fields are of these steps, too."""
    between_seconds: float = 0.0
    between_worth: float = 0.0
    late: float = 0.0
    """Share of all steps in which this replica was late."""


def speed(ends: list[float], marks: list[int], worth: Callable[[int], float], late: float = 0.0) -> Speed:
    """Return the speed, given the times at which steps ended (`ends[0]` is the start) and the last step of each round."""
    rounds = list(itertools.pairwise(marks))
    return Speed(
        steps=marks[-1] - marks[0],
        seconds=ends[marks[-1]] - ends[marks[0]],
        worth=sum(worth(step) for step in range(marks[0] + 1, marks[-1] + 1)),
        between_steps=sum(b - 1 - a for a, b in rounds),
        between_seconds=sum(ends[b - 1] - ends[a] for a, b in rounds),
        between_worth=sum(worth(step) for a, b in rounds for step in range(a + 1, b)),
        late=late / marks[-1],
    )


def choices(step_seconds: float) -> dict[str, SyncSection]:
    """Return the methods by their names in the table: presets without warm-up, with short rounds."""
    from llmtrain.config import SyncSection
    from llmtrain.sync.methods import METHODS

    def section(method: str, **changes: object) -> SyncSection:
        return SyncSection.model_validate({"method": method, **METHODS[method].PRESET, **changes})

    def steps(every: int) -> dict[str, object]:
        return {"kind": "steps", "every": every}

    # No minimum of steps, because a slow replica takes fewer steps in such a short round than the preset's minimum.
    seconds = {"kind": "seconds", "every": ROUND * step_seconds, "min_steps": 0}
    return {
        "synchronous": section("synchronous"),
        "edit": section("edit", warmup_steps=0, period=steps(ROUND)),
        "a_edit": section("a_edit", warmup_steps=0, period=seconds),
        "wagma_10": section("wagma", period=steps(10)),
        "wagma_50": section("wagma", period=steps(50)),
    }


def measure(sync: SyncSection, scenario: Scenario, replica: Comms, store: dist.Store, settings: Settings) -> Speed:
    """Return this replica's speed under a method. After a first round, complete rounds are measured, at least two
    and about `settings.seconds` in total. All replicas must call this."""
    import torch

    from llmtrain.config import LRScheduleSection
    from llmtrain.lr import LRSchedule
    from llmtrain.parallel.comms import Comms
    from llmtrain.sync.build_method import build_method

    def worth(step: int) -> float:
        return scenario.steps_worth(replica.rank, step, replica.size)

    endless = LRSchedule(1e-3, 10**9, LRScheduleSection(kind="constant"))
    engine = StandIn(replica, settings.values, lambda step: settings.step_seconds * worth(step))
    seconds = TIMEOUT.total_seconds()
    shard = Comms(None, axis="shard")
    method = build_method(sync, engine, replica, shard, endless, seed=0, store=store, timeout_seconds=seconds)
    timed, every = sync.period.kind == "seconds", getattr(sync.period, "every", ROUND)
    round_seconds = every if timed else every * settings.step_seconds * scenario.slowest(every, replica.size)
    rounds = max(2, math.ceil(settings.seconds / round_seconds))
    step, marks = 0, []
    replica.all_gather(torch.zeros(1), "starting together")
    ends = [time.perf_counter()]
    while len(marks) <= rounds:
        step += 1
        plan = method.begin_step(step, endless.at(step))
        engine.step(step, plan.lr)
        method.end_step(step)
        ends.append(time.perf_counter())
        if method.agreed_step(step) is not None and (timed or step % every == 0):
            marks.append(step)
    method.finish()
    method.close()
    return speed(ends, marks, worth, method.stats.late)


def alone(scenario: Scenario, replica: Comms, settings: Settings) -> float:
    """Return this replica's seconds without a method, per step of a fast replica. All replicas measure at once."""
    import torch

    engine = StandIn(
        replica,
        settings.values,
        lambda step: settings.step_seconds * scenario.steps_worth(replica.rank, step, replica.size),
    )
    step, done = 0, 0.0
    replica.all_gather(torch.zeros(1), "starting together")
    started = time.perf_counter()
    while time.perf_counter() - started < settings.seconds:
        step += 1
        engine.step(step, 1e-3)
        done += scenario.steps_worth(replica.rank, step, replica.size)
    return (time.perf_counter() - started) / done


def scenarios(factors: Sequence[float], replicas: int) -> list[Scenario]:
    """Return the scenarios: no slow replica; the last one, by each factor; a different one in each step, by the largest factor."""
    return [Scenario(), *(Scenario(factor, replicas - 1) for factor in factors), Scenario(max(factors))]


def rank_main(rank: int, replicas: int, port: int, settings: Settings) -> None:
    """Run one replica's process, which makes all measurements in turn. Rank 0 puts all results into the store."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    sections = choices(settings.step_seconds)
    results = []
    for turn in range(settings.turns):
        for scenario in scenarios(settings.factors, replicas):
            baseline: list[float] = []
            for name in (None, *settings.methods):
                if rank == 0 and sys.stderr.isatty():
                    print(
                        f"\rturn {turn + 1} of {settings.turns}: {scenario.name}, {name or 'alone'}\033[K",
                        end="",
                        file=sys.stderr,
                    )
                own = dist.PrefixStore(f"{turn} {scenario.name} {name}", store)
                gathered = one_measurement(rank, replicas, own, name and sections[name], scenario, settings)
                if name is None:
                    baseline = [seconds for (seconds,) in gathered]
                else:
                    results.append({"scenario": asdict(scenario), "method": name, "alone": baseline, "rows": gathered})
    if rank == 0:
        store.set("results", json.dumps(results))


def one_measurement(
    rank: int, replicas: int, store: dist.Store, sync: SyncSection | None, scenario: Scenario, settings: Settings
) -> list[list[float]]:
    """Return every replica's numbers, under a method or alone. Each measurement opens a process group and destroys it at the
    end, because the threads of gloo's groups wake up again and again."""
    import torch
    import torch.distributed as dist

    from llmtrain.parallel.comms import Comms

    meeting = dist.PrefixStore("meeting", store)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=replicas, timeout=TIMEOUT)
    replica = Comms(dist.group.WORLD)
    run_alone = sync is None
    measured = alone(scenario, replica, settings) if run_alone else measure(sync, scenario, replica, store, settings)
    row = [measured] if run_alone else list(asdict(measured).values())
    gathered = replica.all_gather(torch.tensor(row, dtype=torch.float64)).tolist()
    dist.destroy_process_group()
    gc.collect()
    return gathered


def shares(scenario: Scenario, baseline: list[float], speeds: list[Speed]) -> dict[str, float]:
    """Return the numbers of one measurement that the table shows, by name."""
    rates = [one.steps / one.seconds for one in speeds]
    rates_alone = [one.steps / (one.worth * unit) for one, unit in zip(speeds, baseline, strict=True)]
    fast = [replica for replica in range(len(speeds)) if scenario.is_fast(replica)]
    slow = [replica for replica in range(len(speeds)) if replica not in fast]
    between = [baseline[n] * speeds[n].between_worth / speeds[n].between_seconds for n in fast]
    return {
        "fast": statistics.median(rates[n] for n in fast),
        "slow": statistics.median(rates[n] for n in slow) if slow else math.nan,
        "all": sum(rates) / sum(rates_alone),
        "between": statistics.median(between),
        "late": statistics.mean(one.late for one in speeds),
    }


def rows_of(results: list[dict]) -> list[Row]:
    """Return the rows of the table, with medians over the turns and their spread."""
    found: dict[tuple[Scenario, str], list[dict[str, float]]] = {}
    for one in results:
        scenario = Scenario(**one["scenario"])
        speeds = [Speed(*row) for row in one["rows"]]
        turns = found.setdefault((scenario, one["method"]), [])
        turns.append(shares(scenario, one["alone"], speeds))
        nobody_slow = found[Scenario(), one["method"]][len(turns) - 1]
        turns[-1]["of nobody slow"] = turns[-1]["between"] / nobody_slow["between"]

    rows = []
    for (scenario, method), turns in found.items():
        middle = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
        spread = {key: " to ".join(f"{100 * end(t[key] for t in turns):.1f}" for end in (min, max)) for key in middle}
        groups = (
            f"{100 * middle['between']:.1f} %",
            spread["between"],
            f"{100 * middle['of nobody slow']:.1f} %" if scenario != Scenario() else "",
            f"{100 * middle['late']:.0f} %",
        )
        rows.append(
            (
                scenario.name,
                method,
                f"{middle['fast']:.1f}",
                "" if math.isnan(middle["slow"]) else f"{middle['slow']:.1f}",
                f"{100 * middle['all']:.1f} %",
                spread["all"],
                *(groups if method.startswith("wagma") else ("",) * len(groups)),
            )
        )
    return rows


def main() -> None:
    """Start the replicas, print the table of their measurements, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--replicas", type=int, default=4, help="a power of two")
    arguments.add_argument("--step-ms", type=float, default=20, help="a fast replica's step")
    arguments.add_argument(
        "--slow", type=float, nargs="+", default=[3, 5], help="how many times as long a slow one's takes"
    )
    arguments.add_argument("--values", type=int, default=20_000, help=f"of each of the stand-in's {BLOCKS} blocks")
    arguments.add_argument("--seconds", type=float, default=3, help="of each measurement, or two rounds")
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES), metavar="METHOD")
    options = arguments.parse_args()
    settings = Settings(
        step_seconds=options.step_ms / 1000,
        seconds=options.seconds,
        turns=options.turns,
        factors=tuple(options.slow),
        values=options.values,
        methods=tuple(options.methods),
    )
    os.environ["OMP_NUM_THREADS"] = "1"

    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    multiprocessing.spawn(rank_main, (options.replicas, store.port, settings), nprocs=options.replicas)
    rows = rows_of(json.loads(store.get("results")))
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    title = f"{options.replicas} replicas, {options.step_ms:g} ms a step, medians of {options.turns} turns"
    show(title, COLUMNS, rows, words=2)
    if options.write:
        table = markdown(COLUMNS, rows, words=2)
        write_page(RESULTS / "stragglers", "What a slow replica costs", [f"{title}.", table, NOTES])


if __name__ == "__main__":
    main()
