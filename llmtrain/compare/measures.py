"""Results and costs of trials: one row per trial, statistics over seeds, and a comparison with the baseline."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pandas as pd

from llmtrain.compare.results import Trial, TrialState
from llmtrain.errors import ResultsError
from llmtrain.validated_text import LossUnit, common_unit, read_validated_text

TrialKey = tuple[str, str, int]
"""Condition, run and seed of a trial that the comparison plans."""
RUN = ["condition", "run"]
COSTS = ["seconds", "tokens", "bytes"]
"""Costs until a loss is reached: training seconds, tokens of all replicas, bytes sent between replicas."""
SPLIT = ["computing", "exposed", "waiting"]
"""Parts of the training seconds, as means over ranks. Their sum is the total."""
WIRE = ["wire_counted", "wire_others", "wire_sent", "wire_received", "wire_ratio"]
"""Traffic of all hosts: bytes counted for the method, bytes counted for validation and metrics, bytes that the network
cards sent and received, and the ratio of sent to counted bytes."""
RATIOS = ["speed_up", "own_speed_up", "byte_share"]
"""Ratios of a trial and the baseline's trial with the same condition and seed: the baseline's seconds to the target divided by
the trial's, the same for the trial's own final loss, and the trial's bytes to the target divided by the baseline's."""
MEASURES = ["final_loss", "bytes_sent", "training_seconds", "tokens_per_second", "measured", *SPLIT, *WIRE, *COSTS]
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles (97.5 %) of Student's t distribution with 1 to 9 degrees of freedom, from the NIST/SEMATECH e-Handbook of Statistical
Methods, section 1.3.6.7.2."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
RATE = re.compile(r"(\d+(?:\.\d+)?)[ _-]?([kmg]bit)(?:/s|ps)?", re.IGNORECASE)
MEGABITS = {"kbit": 1e-3, "mbit": 1.0, "gbit": 1e3}


class Outcome(StrEnum):
    """Verdict on when a run reached the target, compared with the baseline, from the seeds in which both reached it. A run is
    faster or slower if `log_interval` of its speed-ups says so; otherwise, the difference is not significant. It is mixed if it was faster,
    but reached the target in a smaller share of its seeds than the baseline or in at most half of them. It is also mixed if it was
    slower, but reached the target in a larger share. A trial that failed counts as a seed that did not reach the target."""

    BASELINE = "baseline"
    FASTER = "faster"
    SLOWER = "slower"
    NOT_SIGNIFICANT = "not significant"
    MIXED = "mixed"
    NOT_REACHED = "not reached"
    NOT_COMPARABLE = "not comparable"
    NOT_FINISHED = "not finished"


@dataclass(frozen=True)
class Results:
    """Measures of all trials, from which a report is written."""

    trials: pd.DataFrame
    """One row per trial, including planned ones: condition, run, seed, state, trial (a Trial or None), MEASURES, RATIOS. A
    measure is NaN if unknown, and infinite if its loss was never reached. A ratio is infinite if the trial has the cost but the
    pair has no ratio. Conditions and runs keep the comparison's order."""
    runs: pd.DataFrame
    """One row per condition and run: every measure and ratio with the columns of `over_seeds`, failed (a number of trials), and
    outcome."""
    targets: dict[str, float]
    """Target loss per condition; NaN if the baseline has no final loss."""
    baseline: str
    given_target: float | None
    unit: LossUnit


@dataclass(frozen=True)
class Sweep:
    """Conditions whose names differ in one number. A condition without a number, such as `unlimited`, has infinity if
    the numbers are rates, and minus infinity otherwise."""

    label: str
    numbers: dict[str, float]
    is_rate: bool


def validations(trial: Trial) -> pd.DataFrame:
    """Return the validations in order: step, loss (NaN if not finite) and COSTS. Bytes are interpolated over steps. Seconds are NaN
    if the trial has no times."""
    lines = [line for line in trial.lines if "eval/loss" in line]
    points = pd.DataFrame(lines, columns=["step", "seconds", "tokens", "eval/loss"], dtype=float)
    counted = [(line["step"], sent) for line in trial.lines if (sent := line.get("comm/bytes_total")) is not None]
    points["bytes"] = np.interp(points["step"], *zip((0, 0), *counted, strict=True)) if counted else math.nan
    if trial.has_no_times:
        points["seconds"] = math.nan
    return points.rename(columns={"eval/loss": "loss"})


def cost_to_reach(trial: Trial | None, target: float) -> pd.Series:
    """Return COSTS until the validation loss was first at or below `target` (nats per token): infinite if it never was,
    NaN if the trial is not measured or the target is NaN.

    Costs are interpolated linearly between the two validations around that moment. If the earlier loss was not finite,
    the costs of the later validation are returned as they are.
    """
    if trial is None or not trial.is_measured or math.isnan(target):
        return pd.Series(math.nan, COSTS)
    points = validations(trial)
    reached = points.index[points["loss"] <= target]
    if reached.empty:
        return pd.Series(math.inf, COSTS)
    now = points.loc[reached[0]]
    if reached[0] == 0 or math.isnan((before := points.loc[reached[0] - 1])["loss"]):
        return now[COSTS]
    share = (before["loss"] - target) / (before["loss"] - now["loss"])
    return before[COSTS] + share * (now[COSTS] - before[COSTS])


def measure(trial: Trial) -> dict[str, float | None]:
    """Return the measures that need no target. A stopped trial has no final measures, and a failed trial has no measures."""
    found: dict[str, float | None] = {}
    if trial.is_measured:
        seconds, tokens = trial.lines[-1]["seconds"], trial.lines[-1]["tokens"]
        rate = tokens / seconds if seconds else None
        times = {} if trial.has_no_times else {"tokens_per_second": rate, **_time_split(trial)}
        found = {"measured": 1.0, **times}
    if trial.state == TrialState.DONE:
        losses = validations(trial)["loss"]
        found["final_loss"] = losses.iloc[-1] if len(losses) else trial.summary.get("final_eval_loss")
        found["bytes_sent"] = trial.last("comm/bytes_total").get("comm/bytes_total")
        found |= _on_the_wire(trial) if trial.is_measured else {}
        has_times = bool(trial.lines) and not trial.has_no_times
        found["training_seconds"] = trial.lines[-1]["seconds"] if has_times else None
    return found


def _time_split(trial: Trial) -> dict[str, float]:
    """Return the measures in SPLIT; none of them if the trial has not measured waits."""
    last = trial.last("comm/wait_seconds")
    if last.get("comm/exposed_seconds") is None:
        return {}
    waiting = min(last["comm/wait_seconds"], last["comm/exposed_seconds"])
    exposed = last["comm/exposed_seconds"] - waiting
    computing = max(0.0, last["seconds"] - exposed - waiting)
    return {"computing": computing, "exposed": exposed, "waiting": waiting}


def _on_the_wire(trial: Trial) -> dict[str, float | None]:
    """Return the measures in WIRE; none of them without byte counts, as on loopback."""
    counted = trial.last("comm/bytes_total").get("comm/bytes_total")
    if counted is None or not trial.hosts or any(host.get("sent") is None for host in trial.hosts):
        return {}
    others = trial.last("comm/other_bytes_total").get("comm/other_bytes_total", 0.0)
    sent = sum(host["sent"] for host in trial.hosts)
    received = [host.get("received") for host in trial.hosts]
    return {
        "wire_counted": counted,
        "wire_others": others,
        "wire_sent": sent,
        "wire_received": None if None in received else sum(received),
        "wire_ratio": sent / (counted + others) if counted + others else None,
    }


def gather(
    trials: Sequence[Trial], baseline: str | None = None, target: float | None = None, planned: Sequence[TrialKey] = ()
) -> Results:
    """Measure trials and set each run against the baseline.

    `baseline` names a run; by default, the first that averages gradients in every step, else the first. `target` is a
    validation loss in nats per token; by default, under each condition, the highest final loss of the baseline's
    seeds. Raises ResultsError for a baseline that no trial has. If the runs' tokenizers differ, all losses are
    bits per byte. If their validation texts differ, no target is reached and no run is compared.
    """
    unit = common_unit([(trial.run, read_validated_text(trial.path, trial.lines)) for trial in trials])
    trials = [_in_bits_per_byte(trial) for trial in trials] if unit.tag == "eval/bpb" else trials
    by_key = {(trial.condition, trial.run, trial.seed): trial for trial in trials}
    keys = list(dict.fromkeys([*planned, *by_key]))
    names = list(dict.fromkeys(run for _, run, _ in keys))
    if baseline is None:
        baseline = next((trial.run for trial in trials if trial.averages_every_step), names[0])
    if baseline not in names:
        raise ResultsError(f"no run is called {baseline!r}, the baseline; there are {', '.join(names)}")
    conditions = list(dict.fromkeys(condition for condition, _, _ in keys))
    if not planned and len(sweeps := find_sweeps(conditions)) == 1 and len(sweeps[0].numbers) == len(conditions):
        conditions.sort(key=sweeps[0].numbers.__getitem__, reverse=sweeps[0].is_rate)  # from the best to the worst
    keys.sort(key=lambda key: (conditions.index(key[0]), key[1] != baseline, names.index(key[1])))
    table = pd.DataFrame(keys, columns=[*RUN, "seed"])
    table["trial"] = [by_key.get(key) for key in keys]
    table["state"] = [trial.state if trial else TrialState.NOT_YET_RUN for trial in table["trial"]]
    measured = [measure(trial) if trial else {} for trial in table["trial"]]
    table[MEASURES] = pd.DataFrame(measured, table.index, MEASURES, dtype=float)
    # Every finished seed of the baseline reaches the highest of their final losses, so that no pair of trials is lost.
    ends = table.groupby(RUN, sort=False)["final_loss"].max()
    goal = target if unit.is_ranked else math.nan
    targets = {name: goal if goal is not None else ends.get((name, baseline), math.nan) for name in conditions}
    goals = table["condition"].map(targets)
    places = zip(table["trial"], goals, strict=True)
    table[COSTS] = pd.DataFrame([cost_to_reach(*place) for place in places], table.index)
    table[RATIOS] = _ratios(table, baseline, goals, table["final_loss"] if unit.is_ranked else goals * math.nan)
    return Results(table, _against_baseline(table, baseline), targets, baseline, target, unit)


def _in_bits_per_byte(trial: Trial) -> Trial:
    lines = ({**line, "eval/loss": line.get("eval/bpb")} if "eval/loss" in line else line for line in trial.lines)
    return trial.model_copy(update={"lines": tuple(lines), "summary": {}})  # the summary has a loss per token


def over_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """Return, for each run, median, low and high over its seeds, the number of finite values and the number of seeds.

    The median of a measure is infinite if at least half of the seeds never reached the loss; low and high leave those seeds out.
    The median of a ratio leaves out the seeds without one, too.
    """
    measures = [*MEASURES, *RATIOS]
    groups = table.groupby(RUN, sort=False)[measures]
    finite = table.replace(math.inf, math.nan).groupby(RUN, sort=False)[measures]
    medians = groups.median().assign(**finite.median()[RATIOS])
    statistics = {"median": medians, "low": finite.min(), "high": finite.max()}
    statistics |= {"finite": finite.count(), "seeds": groups.count()}
    return pd.concat(statistics, axis=1).swaplevel(axis=1)


def log_interval(ratios: pd.Series) -> tuple[float, float]:
    """Return the ends of the 95 % confidence interval of the mean logarithm of ratios: Student's t interval. Both ends are above
    zero if the geometric mean of the ratios is above 1, except by chance. The ends are the logarithm itself for one ratio, and NaN
    for none. Infinite ratios and NaN are left out. Beyond ten ratios, the interval is slightly too wide."""
    logs = np.log(ratios.replace(math.inf, math.nan).clip(lower=np.finfo(float).tiny))
    degrees = min(logs.count() - 1, len(T_QUANTILES))
    half = T_QUANTILES[degrees - 1] * logs.sem() if degrees > 0 else 0.0
    return logs.mean() - half, logs.mean() + half


def find_sweeps(conditions: Sequence[str]) -> list[Sweep]:
    """Return a sweep for each group of two or more names that differ only in one number.

    Rates are compared in Mbit/s, so `100mbit` and `1gbit` are such names. If exactly one condition has no number in its
    name, it belongs to all sweeps.
    """
    families: dict[str, dict[str, list[float]]] = {}
    for name in conditions:
        plain = RATE.sub(lambda found: f"{float(found[1]) * MEGABITS[found[2].lower()]:g}mbit", name)
        families.setdefault(NUMBER.sub("…", plain), {})[name] = [float(text) for text in NUMBER.findall(plain)]
    bare = [name for name in conditions if not NUMBER.search(name)]
    sweeps = []
    for skeleton, members in families.items():
        columns = enumerate(zip(*members.values(), strict=True))
        varying = [(place, column) for place, column in columns if len(set(column)) > 1]
        if len(varying) == 1 and len(set(varying[0][1])) == len(members):
            [(place, column)] = varying
            is_rate = skeleton.split("…")[place + 1].startswith("mbit")
            common = dict.fromkeys(bare, math.inf if is_rate else -math.inf) if len(bare) == 1 else {}
            numbers = common | dict(zip(members, column, strict=True))
            # The skeleton tells two sweeps of rates, and the files of their pictures, apart.
            label = "bandwidth between hosts (Mbit/s)" + (f", {skeleton}" if skeleton != "…mbit" else "")
            sweeps.append(Sweep(label if is_rate else skeleton, numbers, is_rate))
    return sweeps


def _ratios(table: pd.DataFrame, baseline: str, targets: pd.Series, losses: pd.Series) -> pd.DataFrame:
    """Return RATIOS of each trial, whose losses to reach are in `targets` and `losses`. A ratio is NaN for the baseline and for a
    trial without the cost. It is infinite if there is none: one of the two never reached the loss, the baseline has no results with
    this seed, or the divisor is zero."""
    bases = table[table["run"] == baseline].set_index(["condition", "seed"])["trial"].to_dict()
    partners = [bases.get(key) for key in zip(table["condition"], table["seed"], strict=True)]
    ours, theirs = (_raced_costs(side, targets, losses) for side in (table["trial"], partners))
    ratios = (theirs / ours).assign(byte_share=ours["byte_share"] / theirs["byte_share"])
    has_ratio = np.isfinite(ours) & np.isfinite(theirs) & np.isfinite(ratios)
    return ratios.where(has_ratio, math.inf)[ours.notna()][table["run"] != baseline]


def _raced_costs(trials: Iterable[Trial | None], targets: pd.Series, losses: pd.Series) -> pd.DataFrame:
    """Return, in a column for each of RATIOS, the costs of the trials that it compares."""
    costs = pd.DataFrame([cost_to_reach(*goal) for goal in zip(trials, targets, strict=True)], targets.index)
    own = [cost_to_reach(*goal)["seconds"] for goal in zip(trials, losses, strict=True)]
    return pd.DataFrame({"speed_up": costs["seconds"], "own_speed_up": own, "byte_share": costs["bytes"]})


def _against_baseline(table: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return `Results.runs`."""
    runs = over_seeds(table)
    runs["failed", ""] = (table["state"] == TrialState.FAILED).groupby([table[name] for name in RUN], sort=False).sum()
    is_other = runs.index.get_level_values("run") != baseline
    base = runs.xs(baseline, level="run").reindex(runs.index.get_level_values("condition")).set_axis(runs.index)
    sides = (side["seconds"].assign(failed=side["failed"]).to_dict("records") for side in (runs, base))
    intervals = table.groupby(RUN, sort=False)["speed_up"].apply(log_interval)
    rows = zip(*sides, intervals, strict=True)
    runs["outcome", ""] = [_outcome(*row) for row in rows]
    runs.loc[runs["measured"]["finite"] == 0, ("outcome", "")] = Outcome.NOT_FINISHED
    runs.loc[~is_other, ("outcome", "")] = Outcome.BASELINE
    return runs


def _outcome(ours: dict[str, float], theirs: dict[str, float], interval: tuple[float, float]) -> Outcome:
    """Return the verdict from two facts: the `log_interval` of the speed-ups, and the share of ended trials, failed ones included,
    that reached the target. It is MIXED if the two contradict each other."""
    low, high = interval
    if ours["seeds"] and not ours["finite"]:
        return Outcome.NOT_REACHED
    if math.isnan(low):
        return Outcome.NOT_COMPARABLE
    our_share, their_share = (side["finite"] / (side["seeds"] + side["failed"]) for side in (ours, theirs))
    if low > 0:
        return Outcome.FASTER if our_share >= their_share and our_share > 0.5 else Outcome.MIXED
    if high < 0:
        return Outcome.SLOWER if our_share <= their_share else Outcome.MIXED
    return Outcome.NOT_SIGNIFICANT
