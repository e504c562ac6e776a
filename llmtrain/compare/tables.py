"""The tables of a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from llmtrain.compare import formatting, measures
from llmtrain.compare.aggregate import ConditionResult, Outcome, Results, RunResult, SpeedUp, Spread
from llmtrain.compare.page import Table
from llmtrain.compare.results import DONE, Trial

NOTHING = "–"


def runs_table(condition: ConditionResult) -> Table:
    """One row a run: how far it came and what it cost, medians with the lowest and highest seed."""
    to = f"to loss {formatting.loss(condition.target)}" if condition.target is not None else "to the target"
    columns = (
        *("run", "trials", "final loss", f"time {to}", "speed-up", "speed-up to its own final loss", "tokens/s"),
        *("sent in all", f"sent {to}", "of the baseline's bytes", f"tokens {to}", "training time"),
    )
    return Table(columns, tuple(_run_row(run) for run in condition.runs), words=2)


def _run_row(run: RunResult) -> tuple[str, ...]:
    return (
        run.run,
        trials_in_words(run),
        _cell(run.final_loss, formatting.loss),
        _to_target(run.seconds, formatting.seconds),
        _speed_up(run),
        _times(run.own_speed_up) if run.own_speed_up is not None else NOTHING,
        _cell(run.rate, formatting.count),
        _cell(run.at_the_end(measures.bytes_sent), formatting.size),
        _to_target(run.bytes, formatting.size),
        formatting.percent(run.byte_share) if run.byte_share is not None else NOTHING,
        _to_target(run.tokens, formatting.count),
        _cell(run.at_the_end(measures.training_seconds), formatting.seconds),
    )


def trials_in_words(run: RunResult) -> str:
    """ "3 done", "2 done, 1 failed", "not yet run"."""
    states = [trial.state for trial in run.trials]
    ordered = sorted(dict.fromkeys(states), key=lambda state: state != DONE)
    parts = [f"{states.count(state)} {state}" for state in ordered]
    if run.not_yet_run:
        parts.append(f"{run.not_yet_run} not yet run" if parts else "not yet run")
    return ", ".join(parts)


def wire_table(results: Results) -> Table | None:
    """Interface counters beside what the runs counted; None where no trial has counters."""
    rows = []
    for condition in results.conditions:
        for run in condition.runs:
            wires = [wire for trial in run.measured if (wire := measures.on_the_wire(trial)) is not None]
            if not wires:
                continue
            received = [wire.received for wire in wires if wire.received is not None]
            ratios = [wire.ratio for wire in wires if wire.ratio is not None]
            rows.append(
                (
                    condition.name,
                    run.run,
                    str(len(wires)),
                    formatting.size(statistics.median(wire.counted for wire in wires)),
                    formatting.size(statistics.median(wire.others for wire in wires)),
                    formatting.size(statistics.median(wire.sent for wire in wires)),
                    formatting.size(statistics.median(received)) if received else NOTHING,
                    _cell(Spread(tuple(ratios)), lambda ratio: f"{ratio:.3f}") if ratios else NOTHING,
                )
            )
    counted = ("counted: method", "counted: validation, metrics")
    columns = ("condition", "run", "trials", *counted, "sent by interfaces", "received by interfaces", "sent / counted")
    return Table(columns, tuple(rows), words=2) if rows else None


def recipes_table(results: Results) -> Table:
    """From which recipe, with which overrides and seeds each run was made. Names and folders (`run.`) are left out."""
    rows = []
    for name in results.runs:
        trials = [trial for trial in results.trials if trial.run == name]
        by_making: dict[tuple[str, tuple[str, ...]], list[Trial]] = {}
        for trial in trials:
            told = tuple(override for override in trial.overrides if not override.startswith("run."))
            by_making.setdefault((trial.recipe or "", told), []).append(trial)
        for (recipe, overrides), made in by_making.items():
            seeds = sorted({trial.seed for trial in made})
            conditions = list(dict.fromkeys(trial.condition for trial in made))
            what = " ".join(f"`{override}`" for override in overrides) or NOTHING
            methods = ", ".join(dict.fromkeys(trial.method for trial in made if trial.method)) or NOTHING
            rows.append(
                (
                    name,
                    methods,
                    ", ".join(conditions),
                    _listed(seeds),
                    f"`{recipe}`" if recipe else "`recipe.yaml` in its folder",
                    what,
                )
            )
    return Table(("run", "method", "conditions", "seeds", "recipe", "overrides"), tuple(rows), words=6)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _cell(spread: Spread | None, show: Callable[[float], str]) -> str:
    """Median and, of more than one seed, lowest and highest."""
    if spread is None:
        return NOTHING
    return f"{show(spread.median)}{_range(spread, show)}"


def _range(spread: Spread, show: Callable[[float], str]) -> str:
    """Nothing for one seed, and for seeds that look the same."""
    low, high = show(spread.low), show(spread.high)
    return f" ({low} to {high})" if low != high else ""


def _to_target(spread: Spread | None, show: Callable[[float], str]) -> str:
    """As a cell; seeds that never got there are counted, not averaged."""
    if spread is None:
        return NOTHING
    there, whole = len(spread.finite), len(spread.values)
    if there == whole:
        return _cell(spread, show)
    if there == 0:
        return "not reached"
    middle = show(spread.median) if math.isfinite(spread.median) else "not reached"
    return f"{middle} ({show(spread.low)} to {show(spread.high)} in {there} of {whole})"


def _speed_up(run: RunResult) -> str:
    if run.standing is Outcome.BASELINE:
        return "baseline"
    if run.speed_up is None:
        return run.standing if run.standing in (Outcome.NO_DIFFERENCE, Outcome.MIXED) else NOTHING
    but = f", {run.standing}" if run.standing in (Outcome.NO_DIFFERENCE, Outcome.MIXED) else ""
    return f"{_times(run.speed_up)}{but}"


def _times(speed: SpeedUp) -> str:
    between = f" ({formatting.times(speed.low)} to {formatting.times(speed.high)})" if speed.is_range else ""
    return f"{formatting.times(speed.median)} ×{between}"
