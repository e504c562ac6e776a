"""The same run under the same condition over its seeds, and how it stands against the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from llmtrain.compare import measures
from llmtrain.compare.results import DONE, STOPPED, Trial
from llmtrain.compare.sweep_axis import find_sweeps
from llmtrain.errors import ResultsError

TrialKey = tuple[str, str, int]
"""Condition, run and seed of a trial that the comparison means to make."""


class Outcome(StrEnum):
    """How soon a run got to the target, compared with the baseline. Ranges over seeds that overlap are no difference."""

    BASELINE = "baseline"
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference seen"
    MIXED = "mixed"
    """Sooner, but in fewer seeds; or later, but in more."""
    NOT_REACHED = "not reached"
    UNKNOWN = "not comparable"


@dataclass(frozen=True)
class Spread:
    """A measure over seeds, one value each; infinity where a seed never got there."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Infinite where most seeds never got there."""
        return statistics.median(self.values)

    @property
    def finite(self) -> tuple[float, ...]:
        """The finite values, in increasing order."""
        return tuple(sorted(value for value in self.values if math.isfinite(value)))

    @property
    def low(self) -> float:
        """Of the seeds that got there."""
        return self.finite[0] if self.finite else math.inf

    @property
    def high(self) -> float:
        """Of the seeds that got there."""
        return self.finite[-1] if self.finite else math.inf


@dataclass(frozen=True)
class SpeedUp:
    """The baseline's seconds to a loss / this run's. `low` and `high` are of the ends of their ranges over seeds,
    so that 1 lies between them just where the ranges overlap."""

    median: float
    low: float
    high: float
    is_range: bool


@dataclass
class RunResult:
    """A run under a condition. Failed trials are in no figure, and those that were stopped in none about a run's end."""

    condition: str
    run: str
    trials: list[Trial] = field(default_factory=list)
    planned_seeds: tuple[int, ...] = ()
    target: float | None = None
    standing: Outcome = Outcome.UNKNOWN
    speed_up: SpeedUp | None = None
    """To the target."""
    own_speed_up: SpeedUp | None = None
    """To the loss that this run ends with, for runs that never reach the target: how much sooner they came that far."""
    byte_share: float | None = None
    """Bytes to the target / the baseline's; medians."""

    @property
    def done(self) -> list[Trial]:
        """Those that came to their end."""
        return [trial for trial in self.trials if trial.state == DONE]

    @property
    def measured(self) -> list[Trial]:
        """Those, and the ones that were stopped on the way: their rates count, and what they reached until then."""
        return [trial for trial in self.trials if trial.state in (DONE, STOPPED) and trial.lines]

    @property
    def not_yet_run(self) -> int:
        """Planned seeds that have left nothing yet."""
        return len(set(self.planned_seeds) - {trial.seed for trial in self.trials})

    @property
    def rate(self) -> Spread | None:
        """Tokens per second."""
        return _spread(measures.tokens_per_second, self.measured)

    def at_the_end(self, measure: Callable[[Trial], float | None]) -> Spread | None:
        """Of something that only a whole run has; None where no seed has it."""
        return _spread(measure, self.done)

    def cost_to(self, loss: float | None, part: Callable[[measures.Cost], float | None]) -> Spread | None:
        """Seconds, tokens or bytes until a loss was reached, infinite for seeds that never did."""
        if loss is None or not self.measured:
            return None
        costs = [measures.cost_to_reach(trial, loss) for trial in self.measured]
        values = [math.inf if cost is None else part(cost) for cost in costs]
        return None if None in values else Spread(tuple(value for value in values if value is not None))

    def seconds_to(self, loss: float | None) -> Spread | None:
        """Training seconds until a loss was reached."""
        return self.cost_to(loss, lambda cost: cost.seconds)

    @property
    def seconds(self) -> Spread | None:
        """To the target."""
        return self.seconds_to(self.target)

    @property
    def tokens(self) -> Spread | None:
        """To the target."""
        return self.cost_to(self.target, lambda cost: cost.tokens)

    @property
    def bytes(self) -> Spread | None:
        """To the target."""
        return self.cost_to(self.target, lambda cost: cost.bytes)

    @property
    def final_loss(self) -> Spread | None:
        """Validation loss at the end."""
        return self.at_the_end(measures.final_loss)

    @property
    def end(self) -> float | None:
        """The final loss that at least half of the seeds reach: of an even number the higher middle one."""
        return statistics.median_high(self.final_loss.values) if self.final_loss is not None else None


@dataclass(frozen=True)
class ConditionResult:
    """All runs under a condition, in the order of the comparison."""

    name: str
    in_words: str | None
    target: float | None
    runs: tuple[RunResult, ...]
    baseline: RunResult | None


@dataclass(frozen=True)
class Results:
    """Everything a report says."""

    conditions: tuple[ConditionResult, ...]
    runs: tuple[str, ...]
    baseline: str
    given_target: float | None
    trials: tuple[Trial, ...]


def gather(
    trials: Sequence[Trial], baseline: str | None = None, target: float | None = None, planned: Sequence[TrialKey] = ()
) -> Results:
    """Group trials by condition and run, and measure each against the baseline.

    `baseline` names a run; without it the first that averages gradients in every step is taken, else the first. `target`
    is a validation loss in nats per token; without it, under each condition the median (of an even number of seeds the
    higher middle) of the baseline's final losses. Raises ResultsError for a baseline that no trial has.
    """
    keys = [*planned, *((trial.condition, trial.run, trial.seed) for trial in trials)]
    names = _in_order(run for _, run, _ in keys)
    conditions = _in_order(condition for condition, _, _ in keys)
    scales = find_sweeps(conditions)
    if not planned and len(scales) == 1 and set(scales[0].numbers) == set(conditions):
        conditions.sort(key=scales[0].position, reverse=scales[0].is_rate)
    baseline = _choose_baseline(trials, names, baseline)
    names = [baseline, *(name for name in names if name != baseline)]
    results = []
    for condition in conditions:
        runs = [_gather_run(trials, condition, name, planned) for name in names]
        runs = [run for run in runs if run.trials or run.planned_seeds]
        results.append(_against_baseline(condition, runs, baseline, target))
    return Results(tuple(results), tuple(names), baseline, target, tuple(trials))


def _spread(measure: Callable[[Trial], float | None], trials: Sequence[Trial]) -> Spread | None:
    values = [value for value in map(measure, trials) if value is not None]
    return Spread(tuple(values)) if values else None


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _choose_baseline(trials: Sequence[Trial], names: Sequence[str], given: str | None) -> str:
    if given is not None:
        if given not in names:
            raise ResultsError(f"no run is called {given!r}, the baseline; there are {', '.join(names)}")
        return given
    return next((trial.run for trial in trials if trial.averages_every_step), names[0])


def _gather_run(trials: Sequence[Trial], condition: str, name: str, planned: Sequence[TrialKey]) -> RunResult:
    return RunResult(
        condition,
        name,
        [trial for trial in trials if (trial.condition, trial.run) == (condition, name)],
        tuple(seed for where, run, seed in planned if (where, run) == (condition, name)),
    )


def _against_baseline(
    condition: str, runs: Sequence[RunResult], baseline: str, target: float | None
) -> ConditionResult:
    base = next((run for run in runs if run.run == baseline), None)
    if target is None and base is not None:
        target = base.end
    for run in runs:
        run.target = target
    for run in runs:
        _stand(run, base)
    words = (trial.condition_in_words for run in runs for trial in run.trials if trial.condition_in_words)
    return ConditionResult(condition, next(words, None), target, tuple(runs), base)


def _stand(run: RunResult, base: RunResult | None) -> None:
    """Fill in how `run` stands against `base`."""
    if run is base:
        run.standing = Outcome.BASELINE
        return
    ours = run.seconds
    if ours is not None and not ours.finite:
        run.standing = Outcome.NOT_REACHED
    if base is None:
        return
    run.own_speed_up = _speed_up(run.seconds_to(run.end), base.seconds_to(run.end))
    theirs = base.seconds
    if ours is None or theirs is None or not ours.finite or not theirs.finite:
        return
    run.standing = _compare(ours, theirs)
    run.speed_up = _speed_up(ours, theirs)
    sent, base_sent = run.bytes, base.bytes
    if sent is not None and base_sent is not None and math.isfinite(sent.median) and 0 < base_sent.median < math.inf:
        run.byte_share = sent.median / base_sent.median


def _speed_up(ours: Spread | None, theirs: Spread | None) -> SpeedUp | None:
    """None where most seeds of either never got there, or were there before the first step."""
    if ours is None or theirs is None or not math.isfinite(ours.median + theirs.median) or ours.low <= 0:
        return None
    is_range = max(len(ours.values), len(theirs.values)) > 1
    return SpeedUp(theirs.median / ours.median, theirs.low / ours.high, theirs.high / ours.low, is_range)


def _compare(ours: Spread, theirs: Spread) -> Outcome:
    """By ranges of the seeds that got there, and by how many did: an advantage in one must not be a loss in the other."""
    our_share = len(ours.finite) / len(ours.values)
    their_share = len(theirs.finite) / len(theirs.values)
    if ours.high < theirs.low:
        return Outcome.FASTER if our_share >= their_share and math.isfinite(ours.median) else Outcome.MIXED
    if ours.low > theirs.high:
        return Outcome.SLOWER if our_share <= their_share else Outcome.MIXED
    return Outcome.NO_DIFFERENCE
