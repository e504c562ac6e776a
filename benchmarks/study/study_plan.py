"""Plan of the study's runs, in the order in which they are made: PROTOCOL.md as a function of the results so far.

A cell is a method with a number of replicas and a round length. It has trials, each with about a quarter of the tokens, and then
final runs with the setting of the best trial, all tokens and several seeds. Later trials start from the best of the earlier ones.
Each cell has the same number of trials. study_stages.py lists the cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from study_values import ALWAYS, IN_SHORT_ROUNDS, OUTER, PULL, SHORT_ROUNDS, Overrides, QsrRounds, nesterov

Records = Mapping[str, Mapping[str, Any]]
"""Records of finished runs by id, as `study_runs` writes them."""


TOKENS = 6_400_000
"""Training tokens of a final run: 20 per parameter."""
TEXT_TOKENS = 7_000_000
"""Tokens of text, including validation text, for each TOKENS of training."""
TRIAL_SHARE = 0.25
"""Share of a final run's tokens in a trial."""
UNIT = 30
"""Divisor of each run's number of steps, so that its rounds of 30, 10 and 3 steps are complete."""
TRIALS = 12
TRIAL_SEED, FINAL_SEEDS = 1, (11, 12, 13)
LENGTH = 128
"""Tokens per sequence."""
BATCH = {1: 32, 2: 48, 4: 64, 8: 96}
"""Sequences per global batch by number of replicas."""
WARMUP = 0.1
"""Warm-up steps of the inner learning rate, as a share of a final run's steps. Trials have as many warm-up steps."""
RATES = (0.003, 0.006, 0.012)
"""Inner learning rates of the first trials."""


INNER: dict[str, Overrides] = {"": (), "muon": ("optim.kind=muon", "optim.muon.momentum=0.9")}
"""Keys of each inner optimizer. Those of Muon are MuLoCo's, whose baseline is synchronous training with Muon."""
CLOCKS = {"even": ((1, 1, 1, 1), 0), "half": ((1, 1, 1, 2), 0), "random": ((1, 1, 1, 1), 1)}
"""Virtual clocks of 4 replicas: seconds of each replica's steps, and delay in seconds of one replica, drawn for each step."""
STORIES = ("hf:roneneldan/TinyStories", "validation")
"""Sources of TinyStories, training and validation."""
TOKENIZER = "runs/study/tokenizer"
"""Folder with the tokenizer of Python's text, for runs on both texts."""
AUTO = "auto"
"""Variant of a cell with `sync.outer=auto`."""
ROUNDS_OF_ITS_OWN = ("synchronous", "qsr", "gpa", "wagma")
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
    length: int = 1
    """Tokens of a final run, in units of TOKENS."""
    gradients: str = ""
    """Wire format of the gradients in synchronous steps; empty: fp32."""
    clock: str = ""
    """Virtual clock, for methods whose results depend on speeds: a key of CLOCKS."""
    text: str = ""
    """Text, by its name for `text_keys`. A cell with another text than Python has no trials, but the setting that trials on Python
    chose."""
    variant: str = ""
    """Values of the method that trials compare, if not the usual ones; with the method's name, a key of OUTER. Or AUTO, which has no
    trials: the inner learning rate that the trials of the usual values chose, and `sync.outer=auto`."""

    @property
    def values(self) -> str:
        """Key in OUTER and ALWAYS of the values that trials compare."""
        return f"{self.method}-{self.variant}" if self.variant else self.method

    @property
    def tuned(self) -> Cell:
        """Cell whose trials choose this cell's setting: the cell itself, or another one."""
        return replace(self, text="", variant="" if self.variant == AUTO else self.variant)

    @property
    def label(self) -> str:
        """Name of the method with all that is not as usual: variant, inner optimizer, gradients' format, percentage of
        synchronous steps, multiple of the tokens, uneven clock, and text."""
        together = f"s{100 * self.together:.0f}" if self.together else ""
        length = f"x{self.length}" if self.length > 1 else ""
        clock = self.clock if self.clock != "even" else ""
        return "-".join(
            part for part in (self.values, self.inner, self.gradients, together, length, clock, self.text) if part
        )

    @property
    def name(self) -> str:
        """Part of the ids of the cell's runs."""
        rounds = "" if self.method in ROUNDS_OF_ITS_OWN else f"-h{self.every}"
        return f"{self.label}-m{self.replicas}{rounds}-b{self.batch}"


@dataclass(frozen=True)
class Setting:
    """Inner learning rate and own keys of a method, which trials compare."""

    lr: float
    own: Overrides = ()

    def overrides(self) -> list[str]:
        """Return the recipe's keys."""
        own = (key.key(self.lr) if isinstance(key, QsrRounds) else key for key in self.own)
        return [f"optim.lr={self.lr:.6g}", *own]

    @property
    def pull_probability(self) -> float:
        """Share of steps that are PALSGD's pulls, 0 for other methods."""
        return float(next((key.removeprefix(PULL) for key in reversed(self.overrides()) if key.startswith(PULL)), 0.0))


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    cell: Cell
    kind: str
    """`trial`, `final`, `shorter` (fewer tokens), `heat` (other outer settings), `probe-NAME`, or `fault-NAME-PART`."""
    number: int
    """Number of the trial or of the outer settings, from 0, or seed of the final run or of a probe."""
    setting: Setting
    share: float = 1.0
    """Share of a final run's tokens."""
    fault: str = ""
    """Fault of one replica, for `faulty_run.py`; empty: none."""

    @property
    def id(self) -> str:
        """Name of the run and of its record."""
        percent = f"{100 * self.share:.0f}" if self.kind == "shorter" else ""
        return f"{self.cell.name}-{self.kind}{percent}-{self.number:02}"

    @property
    def seed(self) -> int:
        """Seed of the parameters and of the order of the text."""
        is_short_probe = self.kind.startswith("probe") and self.share < 1
        return (
            TRIAL_SEED if is_short_probe else {"trial": TRIAL_SEED, "heat": FINAL_SEEDS[0]}.get(self.kind, self.number)
        )

    @property
    def steps(self) -> int:
        """Number of steps. PALSGD has more of them, because each of its pulls is a step without tokens."""
        return self._steps_with(self.share)

    @property
    def share_of_tokens(self) -> float:
        """Number of steps divided by that of a final run. It differs from `share`, because lengths are multiples of UNIT."""
        return self.steps / self._steps_with(1.0)

    def _steps_with(self, share: float) -> int:
        training = 1 - self.setting.pull_probability
        tokens = TOKENS * self.cell.length * share
        return UNIT * math.floor(tokens / (self.cell.batch * LENGTH * training) / UNIT + 0.5)

    def _every(self, steps: float) -> int:
        """Return an interval of about `steps` steps. With a virtual clock, it ends with a round, because a run of WAGMA that
        continues within a round would give another result."""
        return UNIT * math.ceil(steps / UNIT) if self.cell.clock else math.ceil(steps)

    def overrides(self) -> list[str]:
        """Return the run's overrides of study.yaml."""
        cell = self.cell
        per_replica = cell.batch // cell.replicas
        return [
            f"run.name={self.id}",
            f"run.seed={self.seed}",
            f"parallel.replicas={cell.replicas}",
            f"train.steps={self.steps}",
            f"train.global_batch={cell.batch}",
            f"train.micro_batch={per_replica if per_replica <= 16 else per_replica // 2}",
            f"schedule.warmup_steps={round(WARMUP * self._steps_with(1.0))}",
            f"sync.method={cell.method}",
            *INNER[cell.inner],
            *([] if cell.method in ROUNDS_OF_ITS_OWN else [f"sync.period.every={cell.every}"]),
            *([f"sync.warmup_steps={round(cell.together * self.steps)}"] if cell.together else []),
            *([f"sync.wire={{kind: {cell.gradients}, gradients: true}}"] if cell.gradients else []),
            *([f"data.max_tokens={cell.length * TEXT_TOKENS}"] if cell.length > 1 else []),
            *text_keys(cell.text),
            *(clock_keys(cell.clock) if cell.clock else []),
            f"eval.every={'null' if self.kind == 'trial' or self.kind.startswith('probe') else self._every(self.steps / 8)}",
            f"checkpoint.every={self._every(self.steps / 4)}",
            *self.setting.overrides(),
        ]


def text_keys(text: str, train: str = STORIES[0], validation: str = STORIES[1]) -> Overrides:
    """Return the keys of a text by name: empty for Python, as in study.yaml; `tinystories`; `mixture`, both in equal parts; or
    `sites`, where two of four replicas read Python and two read TinyStories. `train` and `validation` are the sources of
    TinyStories."""
    if not text:
        return ()
    stories = f"{{source: {train}, validation: {validation}, name: tinystories}}"
    python = "{source: python}"
    return {
        "tinystories": (f"data.source={train}", f"data.validation={validation}"),
        "mixture": (f"data.sources=[{python}, {stories}]", f"data.tokenizer={TOKENIZER}"),
        "sites": (f"data.per_replica=[{python}, {python}, {stories}, {stories}]", f"data.tokenizer={TOKENIZER}"),
    }[text]


def clock_keys(clock: str) -> list[str]:
    """Return the keys of a virtual clock, and of log lines at the ends of rounds, because an interrupted run stops at a log line."""
    seconds, delay = CLOCKS[clock]
    return [f"parallel.virtual_clock={{step_seconds: {list(seconds)}, random_delay: {delay}}}", f"log.every={UNIT}"]


def trials(cell: Cell, done: Records) -> Iterator[Run]:
    """Yield the cell's trials in their order, as far as they are determined by the results so far."""
    runs: list[Run] = []
    always = ALWAYS.get(cell.values, ())
    start = (*always, *(IN_SHORT_ROUNDS.get(cell.method, ()) if cell.every <= SHORT_ROUNDS else ()))
    others = [nesterov(0.7, 0.9) if (*always, *own) == start else own for own in OUTER[cell.values]]

    def add(setting: Setting) -> Run:
        runs.append(Run(cell, "trial", len(runs), setting, TRIAL_SHARE))
        return runs[-1]

    for rate in RATES:
        yield add(Setting(rate, start))
    if (best := best_of(runs, done)) is None:
        return
    for own in others:
        yield add(Setting(best.setting.lr, (*always, *own)))
    while len(runs) < TRIALS:
        if (best := best_of(runs, done)) is None:
            return
        of_best = {run.setting.lr: loss_of(done[run.id]) for run in runs if run.setting.own == best.setting.own}
        yield add(Setting(next_rate(of_best), best.setting.own))


def next_rate(losses: Mapping[float, float]) -> float:
    """Return the learning rate to try next, given the losses of those that were tried with the same other keys: twice or half of
    the best one if it is the highest or lowest, otherwise between it and its better neighbor."""
    rates = sorted(losses)
    place = rates.index(min(rates, key=lambda rate: losses[rate]))
    if place == len(rates) - 1:
        return 2 * rates[-1]
    if place == 0:
        return rates[0] / 2
    neighbor = min(rates[place - 1], rates[place + 1], key=lambda rate: losses[rate])
    return math.sqrt(rates[place] * neighbor)


def best_of(runs: Sequence[Run], done: Records) -> Run | None:
    """Return the run with the lowest final validation loss, or None unless all are done. A run that failed counts as worst.
    Raises ValueError if a record has another setting than its run."""
    if any(run.id not in done for run in runs):
        return None
    for run in runs:
        if (keys := list(done[run.id]["keys"])) != run.setting.overrides():
            raise ValueError(
                f"the record of {run.id} is of {' '.join(keys)}, the plan's run of {' '.join(run.setting.overrides())}"
            )
    return min(runs, key=lambda run: loss_of(done[run.id]))


def loss_of(record: Mapping[str, Any]) -> float:
    """Return a record's final validation loss; infinity for a run that failed."""
    return math.inf if record.get("loss") is None else record["loss"]
