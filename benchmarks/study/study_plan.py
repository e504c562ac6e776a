"""The study's runs, in the order in which they are made: what PROTOCOL.md says, as a function of the results so far.

A cell is a method with a number of replicas and a round length. It has trials, each at a quarter of the tokens, and then final
runs of the best trial with all tokens and several seeds. Trials come in three phases, because the later ones start from the
best of the earlier ones; every cell has the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Records = Mapping[str, Mapping[str, Any]]
"""Records of finished runs by id, as `study_runs` writes them."""


@dataclass(frozen=True)
class QsrRounds:
    """QSR's period, whose growth rate is in units of the learning rate."""

    base: int
    growth: float
    """alpha, in units of peak learning rate x sqrt(base): with 1, rounds grow as soon as the learning rate falls."""

    def key(self, lr: float) -> str:
        """Return the recipe's key."""
        return f"sync.period={{kind: qsr, base: {self.base}, alpha: {self.growth * lr * math.sqrt(self.base):.6g}}}"


Overrides = tuple[str | QsrRounds, ...]
"""Keys of a recipe, as `KEY=VALUE`."""

TOKENS = 6_400_000
"""Training tokens of a final run: 20 per parameter."""
TRIAL_SHARE = 0.25
"""Share of TOKENS in a trial."""
TRIALS = 12
TRIAL_SEED, FINAL_SEEDS = 1, (11, 12, 13)
LENGTH = 128
"""Tokens per sequence."""
BATCH = {1: 32, 2: 48, 4: 64, 8: 96}
"""Sequences per global batch by number of replicas."""
WARMUP = 0.05
"""Share of a run's steps in which the inner learning rate rises."""
RATES = (0.001, 0.002, 0.004, 0.008)
"""Inner learning rates of the first four trials."""


def nesterov(lr: float, momentum: float, warmup: int = 0) -> Overrides:
    """Return an outer Nesterov step whose momentum is complete after `warmup` rounds."""
    return (f"sync.outer={{kind: nesterov, lr: {lr}, momentum: {momentum}, rounds: {{momentum_warmup: {warmup}}}}}",)


def nesterovs(*choices: tuple[float, ...]) -> tuple[Overrides, ...]:
    """Return an outer Nesterov step for each (lr, momentum) or (lr, momentum, warmup)."""
    return tuple(nesterov(*choice) for choice in choices)


def heavy_ball(lr: float, momentum: float, warmup: int = 0) -> Overrides:
    """Return changes of the outer heavy-ball step of SlowMo and CO2."""
    return (
        f"sync.outer.lr={lr}",
        f"sync.outer.momentum={momentum}",
        f"sync.outer.rounds.momentum_warmup={warmup}",
    )


HEAVY_BALLS = tuple(
    heavy_ball(*choice) for choice in ((1.0, 0.3), (1.0, 0.7), (0.7, 0.5), (0.7, 0.7), (1.0, 0.7, 4), (0.5, 0.7))
)

OUTER: dict[str, tuple[Overrides, ...]] = {
    "synchronous": (),
    "local_sgd": (),
    "des_loc": tuple(
        (f"sync.moments={{first: {first}, second: {second}}}",)
        for first, second in ((1, 1), (1, 3), (2, 4), (3, 3), (1, "null"), ("null", 3))
    ),
    "gpa": tuple(
        (f"sync.outer={{kind: gpa, decay: {decay}, share: {share}}}",)
        for decay, share in ((0.9934, 0.7), (0.984, 0.7), (0.96, 0.7), (0.92, 0.7), (0.984, 0.9), (0.96, 0.9))
    ),
    "post_local_sgd": tuple((f"sync.warmup_until_lr={lr}",) for lr in (0.25, 0.75, 0.9)),
    "qsr": tuple((QsrRounds(*rounds),) for rounds in ((4, 1.0), (20, 1.0), (30, 1.0), (10, 0.5), (20, 0.5), (30, 0.5))),
    "slowmo": HEAVY_BALLS,
    "diloco": nesterovs((0.7, 0.9, 4), (0.7, 0.5), (0.4, 0.9), (0.4, 0.9, 4), (1.0, 0.5), (1.0, 0.8, 4)),
    "muloco": nesterovs((0.7, 0.6), (1.0, 0.5), (0.8, 0.8, 4), (0.6, 0.8), (1.0, 0.8, 4), (0.7, 0.9, 4)),
    "sparseloco": (
        ("sync.outer.lr=0.7",),
        ("sync.outer.lr=1.4",),
        ("sync.wire.keep=128",),
        ("sync.wire.keep=256",),
        ("sync.wire.feedback_decay=1.0",),
        ("sync.wire.feedback_decay=0.8",),
    ),
    "streaming_diloco": nesterovs((0.4, 0.9, 4), (0.7, 0.5), (0.2, 0.9), (0.7, 0.9, 4), (1.0, 0.5), (1.0, 0.8, 4)),
    "co2": HEAVY_BALLS,
    "palsgd": (
        nesterov(0.7, 0.9, 4),
        nesterov(0.7, 0.5),
        nesterov(1.0, 0.2),
        (*nesterov(0.7, 0.5), "sync.pull.probability=0.1"),
        (*nesterov(1.0, 0.2), "sync.pull.probability=0.1"),
        (*nesterov(0.7, 0.5), "sync.pull.probability=0.05"),
    ),
    "edit": nesterovs((0.8, 0.85, 4), (0.7, 0.5), (0.4, 0.9), (0.4, 0.9, 4), (1.0, 0.5), (1.0, 0.8, 4)),
}
"""Values of a method's own keys, beside its preset's, for the second phase of trials. A method with fewer than six tries more
inner learning rates instead."""
ALWAYS: dict[str, Overrides] = {
    "qsr": (QsrRounds(10, 1.0),),
    "streaming_diloco": ("sync.schedule.fragments=3",),
}
"""Keys that a method's preset leaves open, or that do not fit the model's three blocks; `OUTER` may replace them."""
SHORT_ROUNDS = 5
"""Steps of the longest round in which an outer momentum of 0.9 multiplies the steps of too few local ones."""
IN_SHORT_ROUNDS: dict[str, Overrides] = {"diloco": nesterov(0.7, 0.5)}
"""Keys of the first trials in short rounds, in the place of the preset's; `OUTER` may replace them."""
ROUNDS_OF_ITS_OWN = ("synchronous", "qsr", "gpa")
"""Methods whose rounds have no fixed number of steps."""


@dataclass(frozen=True)
class Cell:
    """A method with a number of replicas and steps per round."""

    method: str
    replicas: int
    every: int
    batch: int
    """Sequences per global batch."""
    inner: str = ""
    """Inner optimizer; empty: the method's own."""
    together: float = 0.0
    """Share of the steps that are synchronous, before the first round."""

    @property
    def label(self) -> str:
        """Return the method's name, with the inner optimizer if it is not its own, and the percentage of synchronous steps."""
        together = f"s{100 * self.together:.0f}" if self.together else ""
        return "-".join(part for part in (self.method, self.inner, together) if part)

    @property
    def name(self) -> str:
        """Return the cell's part of its runs' ids."""
        rounds = "" if self.method in ROUNDS_OF_ITS_OWN else f"-h{self.every}"
        return f"{self.label}-m{self.replicas}{rounds}-b{self.batch}"


@dataclass(frozen=True)
class Setting:
    """Choices that trials compare."""

    lr: float
    own: Overrides = ()

    def overrides(self) -> list[str]:
        """Return the recipe's keys."""
        own = (key.key(self.lr) if isinstance(key, QsrRounds) else key for key in self.own)
        return [f"optim.lr={self.lr:.6g}", *own]


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    cell: Cell
    kind: str
    """`trial` or `final`."""
    number: int
    """Number of the trial, from 0, or seed of the final run."""
    setting: Setting

    @property
    def id(self) -> str:
        """Return the name of the run and of its record."""
        return f"{self.cell.name}-{self.kind}-{self.number:02}"

    @property
    def steps(self) -> int:
        """Return the run's steps."""
        share = TRIAL_SHARE if self.kind == "trial" else 1.0
        return round(TOKENS * share / (self.cell.batch * LENGTH))

    def overrides(self) -> list[str]:
        """Return what the run changes in study.yaml."""
        cell, is_final = self.cell, self.kind == "final"
        per_replica = cell.batch // cell.replicas
        return [
            f"run.name={self.id}",
            f"run.seed={self.number if is_final else TRIAL_SEED}",
            f"parallel.replicas={cell.replicas}",
            f"train.steps={self.steps}",
            f"train.global_batch={cell.batch}",
            f"train.micro_batch={per_replica if per_replica <= 16 else per_replica // 2}",
            f"schedule.warmup_steps={round(WARMUP * self.steps)}",
            f"sync.method={cell.method}",
            *([f"optim.kind={cell.inner}"] if cell.inner else []),
            *([] if cell.method in ROUNDS_OF_ITS_OWN else [f"sync.period.every={cell.every}"]),
            *([f"sync.warmup_steps={round(cell.together * self.steps)}"] if cell.together else []),
            f"eval.every={math.ceil(self.steps / 8) if is_final else 'null'}",
            f"checkpoint.every={math.ceil(self.steps / 4)}",
            *self.setting.overrides(),
        ]


def trials(cell: Cell, done: Records) -> Iterator[Run]:
    """Yield the cell's trials in their order, as far as they are determined by the results so far."""
    runs: list[Run] = []
    always = ALWAYS.get(cell.method, ())
    start = (*always, *(IN_SHORT_ROUNDS.get(cell.method, ()) if cell.every <= SHORT_ROUNDS else ()))
    others = [nesterov(0.7, 0.9) if (*always, *own) == start else own for own in OUTER[cell.method]]

    def add(setting: Setting) -> Run:
        runs.append(Run(cell, "trial", len(runs), setting))
        return runs[-1]

    for rate in RATES:
        yield add(Setting(rate, start))
    if (best := best_of(runs, done)) is None:
        return
    for own in others:
        yield add(Setting(best.setting.lr, (*always, *own)))
    # Rates around the best one, nearer and nearer, where a method has fewer keys of its own.
    missing = TRIALS - 2 - len(runs)
    factors = [2**exponent for exponent in (0.5, -0.5, 0.25, -0.25, 0.75, -0.75)]
    for factor in factors[:missing]:
        yield add(Setting(best.setting.lr * factor, best.setting.own))
    if (best := best_of(runs, done)) is None:
        return
    for rate in last_rates(best.setting, [run.setting for run in runs]):
        yield add(Setting(rate, best.setting.own))


def last_rates(best: Setting, tried: Sequence[Setting]) -> tuple[float, float]:
    """Return the two learning rates to try last: on both sides of the best one, or twice beyond it if it is the lowest or
    highest so far."""
    rates = sorted({setting.lr for setting in tried})
    nearer = 2**0.5 if len([setting for setting in tried if setting.own == best.own]) <= len(RATES) else 2**0.125
    if best.lr == rates[-1]:
        return best.lr * 2**0.5, best.lr * 2
    if best.lr == rates[0]:
        return best.lr / 2**0.5, best.lr / 2
    return best.lr * nearer, best.lr / nearer


def best_of(runs: Sequence[Run], done: Records) -> Run | None:
    """Return the run with the lowest final validation loss, or None unless all are done. A run that failed counts as worst."""
    if any(run.id not in done for run in runs):
        return None
    return min(runs, key=lambda run: loss_of(done[run.id]))


def loss_of(record: Mapping[str, Any]) -> float:
    """Return a record's final validation loss; infinity for a run that failed."""
    return math.inf if record.get("loss") is None else record["loss"]


def runs_of(cell: Cell, done: Records) -> list[Run]:
    """Return the cell's runs as far as they are determined, finished ones included."""
    tried = list(trials(cell, done))
    if len(tried) < TRIALS or (best := best_of(tried, done)) is None:
        return tried
    return [*tried, *(Run(cell, "final", seed, best.setting) for seed in FINAL_SEEDS)]


METHODS = (
    *("synchronous", "diloco", "local_sgd", "edit", "streaming_diloco", "muloco"),
    *("sparseloco", "palsgd", "qsr", "co2", "slowmo", "post_local_sgd", "des_loc"),
)
FEW = ("synchronous", "diloco")
STAGES = {
    "main": (
        *(Cell(method, 4, 30, BATCH[4]) for method in METHODS),
        Cell("synchronous", 4, 30, BATCH[4], inner="muon"),
    ),
    "together": tuple(Cell(method, 4, 30, BATCH[4], together=0.08) for method in ("diloco", "local_sgd", "edit")),
    "replicas": (
        *(Cell(method, replicas, 30, BATCH[replicas]) for replicas in (8, 1, 2) for method in FEW),
        Cell("gpa", 1, 1, BATCH[1]),
    ),
    "rounds": (
        *(Cell(method, 4, 3, BATCH[4]) for method in METHODS[1:3]),
        *(Cell(method, 4, every, BATCH[4]) for every in (10, 100) for method in METHODS[1:4]),
    ),
    "batch": tuple(Cell(method, 4, 30, batch) for batch in (32, 128) for method in FEW),
}
"""Cells by stage, in the order in which they are run."""
URGENT = (*STAGES["main"][:4], STAGES["rounds"][0], *STAGES["together"], *STAGES["rounds"][1:4])
"""Cells to run before all others: whether shorter rounds or a few synchronous steps close DiLoCo's gap matters more than the
next method's loss."""


def pending(stages: Sequence[str], done: Records) -> list[Run]:
    """Return the runs that can be made now, in the order in which to make them: cell by cell, those in `URGENT` first."""
    cells = [cell for stage in stages for cell in STAGES[stage]]
    cells.sort(key=lambda cell: URGENT.index(cell) if cell in URGENT else len(URGENT))
    return [run for cell in cells for run in runs_of(cell, done) if run.id not in done]


def total(stages: Sequence[str]) -> int:
    """Return the number of runs of some stages."""
    return sum(len(STAGES[stage]) for stage in stages) * (TRIALS + len(FINAL_SEEDS))
