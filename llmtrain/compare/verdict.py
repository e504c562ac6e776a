"""What the numbers say, in a sentence on top and one paragraph a condition: also where they say nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.compare import formatting
from llmtrain.compare.aggregate import ConditionResult, Outcome, Results, RunResult
from llmtrain.compare.results import AS_RUN, DONE


@dataclass(frozen=True)
class Verdict:
    """`sentence` goes on top; `details` name the others, losers too."""

    sentence: str
    details: tuple[str, ...]


def verdict(results: Results) -> Verdict:
    """Nothing is called faster whose range over seeds overlaps with the baseline's."""
    others = [_others(condition) for condition in results.conditions]
    sentences = [_sentence(condition, results) for condition in results.conditions]
    if len(sentences) == 1:
        return Verdict(sentences[0], tuple(filter(None, others)))
    details = tuple(f"{sentence} {other}".strip() for sentence, other in zip(sentences, others, strict=True))
    return Verdict(_over_conditions(results), details)


def leaders(condition: ConditionResult) -> list[RunResult]:
    """The runs that were faster than the baseline and than which none was seen to be faster, soonest first."""
    faster = [run for run in condition.runs if run.standing is Outcome.FASTER and run.speed_up is not None]
    if not faster:
        return []
    faster.sort(key=lambda run: -run.speed_up.median if run.speed_up else 0.0)
    best = faster[0].seconds
    assert best is not None
    return [run for run in faster if run.seconds is not None and run.seconds.low <= best.high]


def _sentence(condition: ConditionResult, results: Results) -> str:
    """What happened under a condition."""
    return f"{_under(condition)}{_happened(condition, results)}."


def _happened(condition: ConditionResult, results: Results) -> str:
    base, target = condition.baseline, condition.target
    measured = [run for run in condition.runs if run.measured]
    if not measured:
        return f"no run has finished{_why_not(condition.runs)}, so there is nothing to compare"
    if len(measured) == 1:
        return f"there is nothing to compare: of {len(condition.runs)} runs only {_alone(measured[0])}"
    if target is None:
        why = "has no finite final validation loss"
        if base is None or not base.done:
            why = f"has not finished{_why_not([base]) if base else ''}"
        return f"the baseline {results.baseline} {why}, so nothing is measured against it; {_lowest(measured)}"
    first = leaders(condition)
    if first and base is not None:
        return _won(first, base, condition, results)
    goal = _goal(condition, results)
    if not any(run.seconds and run.seconds.finite for run in measured):
        return f"no run reached {goal}; {_lowest(measured)}"
    if base is None or base.seconds is None or not base.seconds.finite:
        return f"the baseline {results.baseline} did not reach {goal}; {_soonest(measured)}"
    took = f", in {formatting.seconds(base.seconds.median)}" if math.isfinite(base.seconds.median) else ""
    none = (
        f"no run was seen to reach {goal} sooner than {base.run} itself{took} ({formatting.seeds(len(base.measured))})"
    )
    close = closest(condition)
    if close is None or close.own_speed_up is None or close.end is None:
        return none
    return (
        f"{none}; but {close.run} ended at {formatting.loss(close.end)} and got there "
        f"{formatting.times(close.own_speed_up.median)} times as fast as {base.run}, which was then in the middle of its schedule"
    )


def closest(condition: ConditionResult) -> RunResult | None:
    """Of the runs that did not reach the target but came to their own final loss sooner than the baseline, the one that
    ended lowest."""
    runs = [
        run
        for run in condition.runs
        if run.standing is Outcome.NOT_REACHED and run.own_speed_up is not None and run.own_speed_up.low > 1
    ]
    return min(runs, key=lambda run: run.end or math.inf, default=None)


def _won(first: Sequence[RunResult], base: RunResult, condition: ConditionResult, results: Results) -> str:
    best = first[0]
    assert best.seconds is not None and best.speed_up is not None
    speed = best.speed_up
    between = f", {formatting.times(speed.low)} to {formatting.times(speed.high)}" if speed.is_range else ""
    share = f", with {formatting.percent(best.byte_share)} of its bytes" if best.byte_share is not None else ""
    same = f"; {_no_difference(first)}" if len(first) > 1 else ""
    there, whole = len(best.seconds.finite), len(best.seconds.values)
    some = f" in {there} of {whole} seeds" if there < whole else ""
    return (
        f"{best.run} reached {_goal(condition, results)}{some} in {formatting.seconds(best.seconds.median)}, "
        f"{formatting.times(speed.median)} times as fast as {base.run} ({_seeds(best, base)}{between}){share}{same}"
    )


def _no_difference(first: Sequence[RunResult]) -> str:
    return f"between it and {formatting.listed([run.run for run in first[1:]])} no difference was seen"


def _over_conditions(results: Results) -> str:
    """One sentence over several conditions."""
    goal = "the target loss" if results.given_target is not None else f"{results.baseline}'s final loss"
    won, lost, silent, seeds = [], [], [], []
    for condition in results.conditions:
        first, base = leaders(condition), condition.baseline
        if first and base is not None and first[0].speed_up is not None:
            names = formatting.listed([run.run for run in first])
            won.append(f"{names} under {condition.name} ({formatting.times(first[0].speed_up.median)} times as fast)")
            seeds += [len(run.measured) for run in (first[0], base)]
        elif _was_compared(condition):
            lost.append(condition)
        else:
            silent.append(condition.name)
    parts = []
    if won:
        single = ", with one seed, which does not exclude chance" if min(seeds) == 1 else ""
        parts.append(f"{formatting.listed(won)} reached {goal} sooner than {results.baseline}{single}")
    if lost:
        none = f"under {formatting.listed([condition.name for condition in lost])} no run was seen to reach {goal} sooner than"
        parts.append(f"{none} {results.baseline} itself{_though(lost)}")
    if silent:
        parts.append(f"nothing can be said {'yet ' if _is_running(results) else ''}of {formatting.listed(silent)}")
    text = "; ".join(parts)
    return f"{text if won else text[0].upper() + text[1:]}."


def _though(lost: Sequence[ConditionResult]) -> str:
    """The greatest advantage that the target hides."""
    found = [(run.own_speed_up.median, run, one) for one in lost if (run := closest(one)) and run.own_speed_up]
    if not found:
        return ""
    speed, run, condition = max(found, key=lambda entry: entry[0])
    times = f"{formatting.times(speed)} times as fast (the baseline in mid-schedule)"
    return f", but {run.run} under {condition.name} came to its own final loss {times}"


def _is_running(results: Results) -> bool:
    return any(run.not_yet_run for condition in results.conditions for run in condition.runs)


def _was_compared(condition: ConditionResult) -> bool:
    base = condition.baseline
    others = [run for run in condition.runs if run is not base and run.measured]
    return bool(base is not None and base.seconds is not None and base.seconds.finite and others)


def _others(condition: ConditionResult) -> str:
    """Everyone whom the sentence does not name, losers first."""
    first = leaders(condition)
    groups = {standing: [] for standing in Outcome}
    for run in condition.runs:
        if run.measured and run not in first:
            groups[run.standing].append(run)
    parts = [
        ("slower than the baseline", [f"{run.run}{_speed(run)}" for run in groups[Outcome.SLOWER]]),
        ("did not reach it", [f"{run.run} ({_ended(run)})" for run in groups[Outcome.NOT_REACHED]]),
        (
            "mixed (sooner in fewer seeds, or later in more)",
            [f"{run.run}{_speed(run)}" for run in groups[Outcome.MIXED]],
        ),
        ("no difference seen", [f"{run.run}{_speed(run)}" for run in groups[Outcome.NO_DIFFERENCE]]),
        ("faster too", [f"{run.run}{_speed(run)}" for run in groups[Outcome.FASTER]]),
        ("not finished", [f"{run.run} ({state})" for run in condition.runs if (state := _unfinished(run))]),
    ]
    said = "; ".join(f"{title}: {', '.join(names)}" for title, names in parts if names)
    return f"{said[0].upper()}{said[1:]}." if said else ""


def _ended(run: RunResult) -> str:
    """Where a run ended, and how soon it was there."""
    if run.final_loss is None:
        return "no final loss"
    own = run.own_speed_up
    sooner = f", there {formatting.times(own.median)} times as fast" if own is not None else ""
    return f"ended at {formatting.loss(run.final_loss.median)}{sooner}"


def _speed(run: RunResult) -> str:
    if run.speed_up is None:
        return ""
    return f" ({formatting.times(run.speed_up.median)} times as fast)"


def _unfinished(run: RunResult) -> str:
    """What is missing of a run: "1 failed, 2 not yet run"."""
    states = [trial.state for trial in run.trials if trial.state != DONE]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    if run.not_yet_run:
        parts.append(f"{run.not_yet_run} not yet run")
    return ", ".join(parts)


def _why_not(runs: Sequence[RunResult]) -> str:
    said = [f"{run.run}: {_unfinished(run)}" for run in runs if _unfinished(run)]
    return f" ({'; '.join(said)})" if said else ""


def _under(condition: ConditionResult) -> str:
    return "As run, " if condition.name == AS_RUN else f"Under {condition.name}, "


def _goal(condition: ConditionResult, results: Results) -> str:
    assert condition.target is not None
    whose = "a validation loss of" if results.given_target is not None else f"{results.baseline}'s final loss"
    return f"{whose} {formatting.loss(condition.target)}"


def _seeds(run: RunResult, base: RunResult) -> str:
    """How many seeds stand behind a comparison."""
    ours, theirs = len(run.measured), len(base.measured)
    if ours == theirs == 1:
        return "one seed: chance is not excluded"
    return formatting.seeds(ours) if ours == theirs else f"{formatting.seeds(ours)} against {theirs}"


def _alone(run: RunResult) -> str:
    loss = run.final_loss
    number = formatting.seeds(len(run.measured))
    if not run.done:
        return f"{run.run} was measured, and it was stopped ({number})"
    reached = f"at a validation loss of {formatting.loss(loss.median)}" if loss else "without a finite validation loss"
    return f"{run.run} has finished, {reached} ({number})"


def _lowest(finished: Sequence[RunResult]) -> str:
    """Who ended lowest; nobody, where ranges overlap."""
    ended = sorted((run.final_loss.median, run.run) for run in finished if run.final_loss)
    if not ended:
        return "no run has a finite validation loss"
    losses = [run.final_loss for run in finished if run.final_loss and run.run == ended[0][1]]
    others = [run.final_loss for run in finished if run.final_loss and run.run != ended[0][1]]
    close = any(other.low <= losses[0].high for other in others)
    said = f"{ended[0][1]} ended lowest, at {formatting.loss(ended[0][0])}"
    return f"{said}, but ranges over seeds overlap" if close else said


def _soonest(measured: Sequence[RunResult]) -> str:
    """Who reached the target soonest where there is no baseline to set it beside."""
    reached = sorted((run.seconds.median, run.run) for run in measured if run.seconds and run.seconds.finite)
    median, run = reached[0]
    took = f", in {formatting.seconds(median)}" if math.isfinite(median) else " in some of its seeds"
    return f"{run} reached it soonest{took}"
