"""Numbers, tables and the headline of a report, as text."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable

import pandas as pd

from llmtrain.compare.measures import Outcome, Results
from llmtrain.compare.results import AS_RUN, DONE

NOTHING = "–"


def seconds(value: float) -> str:
    """Format a duration: 4.23 -> "4.2 s", 41.2 -> "41 s", 130 -> "2.2 min", 8000 -> "2.2 h"."""
    if value < 119.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: float) -> str:
    """Format bytes: "3.24 GB"."""
    return f"{_scaled(value)}B"


def count(value: float) -> str:
    """Format tokens, or tokens per second: "1.23 M"."""
    return _scaled(value).strip()


def loss(value: float) -> str:
    """Format nats per token, to three decimals."""
    return f"{value:.3f}"


def ratio(value: float) -> str:
    """Format a ratio, with fewer digits the larger it is: 0.97, 5.2, 41."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def percent(share: float) -> str:
    """Format a share: 0.021 -> "2.1 %", 0.97 -> "97 %"."""
    value = 100 * share
    if 0 < value < 0.05:
        return "less than 0.1 %"
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %"


def _scaled(value: float) -> str:
    """Return three digits and an SI prefix, to which a unit may be appended: 3.2448e9 -> "3.24 G"."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    return f"{value:.0f} {prefix}" if abs(value) >= 99.95 else f"{value:.3g} {prefix}"


def literal(text: str) -> str:
    """Return Markdown that shows `text` as it is."""
    return re.sub(r"([\\*`<\[\]])", r"\\\1", text)


def cell(spread: dict[str, float], show: Callable[[float], str]) -> str:
    """Return the median, and the range if its ends look different. If not all seeds got there, add how many did."""
    if not spread["seeds"] > 0:
        return NOTHING
    if not spread["finite"]:
        return "not reached"
    median = show(spread["median"]) if math.isfinite(spread["median"]) else "not reached"
    low, high = show(spread["low"]), show(spread["high"])
    if spread["finite"] < spread["seeds"]:
        return f"{median} ({low} to {high} in {spread['finite']:.0f} of {spread['seeds']:.0f})"
    return f"{median} ({low} to {high})" if low != high else median


def runs_table(results: Results, condition: str) -> pd.DataFrame:
    """Return one row per run with its outcome and its costs."""
    runs = results.runs.loc[condition]
    by_run = results.trials[results.trials["condition"] == condition].groupby("run", sort=False)["state"]
    unfinished = by_run.agg(lambda states: f"{Outcome.NOT_FINISHED} {(states != DONE).sum()} of {len(states)}")
    target = results.targets[condition]
    to = "to the target" if math.isnan(target) else f"to loss {loss(target)}"
    columns = {
        "trials": by_run.agg(lambda states: ", ".join(f"{n} {state}" for state, n in Counter(sorted(states)).items())),
        "outcome": runs["outcome"].where(runs["outcome"] != Outcome.NOT_FINISHED, unfinished),
        "final loss": _cells(runs["final_loss"], loss),
        f"time {to}": _cells(runs["seconds"], seconds),
        "speed-up": _cells(runs["speed_up"], ratio),
        "speed-up to its own final loss": _cells(runs["own_speed_up"], ratio),
        "tokens/s": _cells(runs["tokens_per_second"], count),
        "sent in all": _cells(runs["bytes_sent"], size),
        f"sent {to}": _cells(runs["bytes"], size),
        "of the baseline's bytes": [NOTHING if math.isnan(share) else percent(share) for share in runs["byte_share"]],
        f"tokens {to}": _cells(runs["tokens"], count),
        "training time": _cells(runs["training_seconds"], seconds),
    }
    return pd.DataFrame(columns, runs.index).rename(index=literal).reset_index()


def wire_table(results: Results) -> pd.DataFrame:
    """Return one row per condition and run with interface counters: medians of these and of the bytes counted."""
    runs = results.runs[results.runs["wire_sent"]["seeds"] > 0]
    counted = {"counted: method": "wire_counted", "counted: validation, metrics": "wire_others"}
    columns = {"trials": runs["wire_sent"]["seeds"].astype(int)}
    for title, name in (
        counted | {"sent by interfaces": "wire_sent", "received by interfaces": "wire_received"}
    ).items():
        columns[title] = [NOTHING if math.isnan(median) else size(median) for median in runs[name]["median"]]
    columns["sent / counted"] = _cells(runs["wire_ratio"], loss)
    return pd.DataFrame(columns, runs.index).rename(index=literal).reset_index()


def recipes_table(results: Results) -> pd.DataFrame:
    """Return the recipe, overrides and seeds of each run. Names and folders (`run.`) are left out of the overrides."""
    makings = []
    for trial in results.trials["trial"].dropna():
        recipe = f"`{trial.recipe}`" if trial.recipe else "`recipe.yaml` in its folder"
        overrides = " ".join(f"`{one}`" for one in trial.overrides if not one.startswith("run.")) or NOTHING
        makings.append((literal(trial.run), trial.method, literal(trial.condition), trial.seed, recipe, overrides))
    table = pd.DataFrame(makings, columns=["run", "method", "conditions", "seeds", "recipe", "overrides"])
    groups = table.groupby(["run", "recipe", "overrides"], sort=False)
    listed = groups.agg(lambda values: ", ".join(map(str, dict.fromkeys(values.dropna()))) or NOTHING)
    return listed.reset_index()[table.columns]


def headline(results: Results) -> str:
    """Return the largest speed-up as a sentence. No run is called faster if its range overlaps the baseline's."""
    runs, baseline = results.runs, results.baseline
    ranked = runs["speed_up"][runs["outcome"] == Outcome.FASTER].dropna().sort_values("median", ascending=False)
    if ranked.empty:
        silent = [Outcome.BASELINE, Outcome.NOT_FINISHED, Outcome.NOT_COMPARABLE]
        if runs["outcome"].isin(silent).all():
            return f"Nothing to compare: no other run than the baseline {baseline} has results, or the baseline has no loss to reach"
        return f"No run was seen to be faster than the baseline {baseline}"
    condition, name = ranked.index[0]
    speed_up, best, base = ranked.iloc[0], *(runs.loc[(condition, run), "seconds"] for run in (name, baseline))
    rivals = runs.loc[ranked.index[1:], "seconds"].query("condition == @condition and low <= @best['high']")
    between = f"{ratio(speed_up['low'])} to {ratio(speed_up['high'])}, " if speed_up["seeds"] > 1 else ""
    fewest = min(best["seeds"], base["seeds"])
    seeds = f"{fewest:.0f} seeds" if fewest > 1 else "1 seed: chance is not excluded"
    goal = f"{baseline}'s final loss" if results.given_target is None else "a validation loss of"
    under = f" under {condition}" if condition != AS_RUN else ""
    tied = f"; no difference to {', '.join(run for _, run in rivals.index)}" if len(rivals) else ""
    times = f"{ratio(speed_up['median'])} times as fast as {baseline}"
    return f"Fastest to {goal} {loss(results.targets[condition])}: {name}{under}, {times} ({between}{seeds}){tied}"


def _cells(spreads: pd.DataFrame, show: Callable[[float], str]) -> list[str]:
    return [cell(spread, show) for spread in spreads.to_dict("records")]
