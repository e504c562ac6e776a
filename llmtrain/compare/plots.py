"""Plots of a comparison: loss against its costs, the parts of the training time, throughput over conditions, and
timelines of all ranks over a few rounds, from trace spans."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from llmtrain.compare.measures import SPLIT, Results, Sweep, validations
from llmtrain.compare.results import Trial, TrialState
from llmtrain.run_plots import plain_label

COLORS = ["0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "8b4513", "7f3fbf", "c4102f", "4d6a6d", "8fae1b"]
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X<>hp"
KINDS = {
    "step": ("#e8e8e8", "rest of a step"),
    "data": ("#b8a9d9", "reading data"),
    "gradient": ("#9ecae1", "computing"),
    "delay": ("#5f6b73", "injected delay"),
    "exposed": ("#f28e2b", "exposed communication"),
    "wait": ("#c4302b", "waiting for the slowest replica"),
    "message": ("#1b7837", "message in flight in the background"),
}
"""Color and label by kind of span. Inner spans come after the outer ones, because they are drawn over them."""
SPLIT_KINDS = dict(zip(SPLIT, ("gradient", "exposed", "wait"), strict=True))
"""Kind of span that gives each part of the training time its color and label."""
AXES = {"tokens": "tokens of all replicas", "seconds": "training time (s)", "bytes": "bytes sent between replicas"}
WIDTH = 5.2
"""Inches. A picture of this width is legible on a phone."""
LARGE_RATIO = 8.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
TIMELINE_WIDTH = 12.0
MAX_RANKS = 8
"""Maximum number of ranks in a timeline, so that it stays legible."""
ROUNDS = 2
"""Number of complete rounds per window of a timeline, which therefore shows three synchronizations."""
LONGEST = 3.0
"""Maximum length of a window, as a multiple of the length that the median run needs."""
NOTICEABLE = 0.01
"""Fraction of a step below which an exposed wait does not count as the start of a synchronization."""
MARGIN = 0.12
"""Fraction of the window that lies before its first synchronization."""


def styles(results: Results) -> dict[str, dict[str, Any]]:
    """Return the line style of each run, the same in every picture: black for the baseline, and a color (the first
    eleven differ), marker and dash for each other run."""
    made = {results.baseline: {"color": "black", "linestyle": "-", "marker": "o"}}
    for number, run in enumerate(run for run in results.trials["run"].unique() if run != results.baseline):
        line, marker = LINES[number // 4 % len(LINES)], MARKERS[(number + 1) % len(MARKERS)]
        made[run] = {"color": f"#{COLORS[number % len(COLORS)]}", "linestyle": line, "marker": marker}
    return made


def draw_loss(results: Results, condition: str, cost: str) -> Figure | None:
    """Draw validation loss against a cost: a thin line per seed, a thick one for the median. Return None if there are no points."""
    figure, axes = _figure(4.6)
    trials = results.trials[results.trials["condition"] == condition].dropna(subset="trial")
    medians, looks = [], styles(results)
    for run, rows in trials.groupby("run", sort=False):
        curves = {row.Index: curve for row in rows.itertuples() if len(curve := _curve(row.trial, cost))}
        if not curves:
            continue
        look, is_done = looks[run], rows["state"] == TrialState.DONE
        for index, curve in curves.items():
            axes.plot(curve[cost], curve["loss"], **look | {"marker": ""}, linewidth=0.9, alpha=0.45)
            if not is_done[index]:
                axes.plot(*curve[[cost, "loss"]].iloc[-1], "x", color=look["color"], markersize=11, markeredgewidth=2.5)
        done = [curve for index, curve in curves.items() if is_done[index]] or list(curves.values())
        thick = median_curve(done)
        axes.plot(thick[cost], thick["loss"], **look, markersize=4.5, linewidth=1.7, label=plain_label(run))
        medians.append(thick)
    if not medians:
        return None
    # The axis ends at the median loss after a quarter of the validations, because readers compare the ends of the curves.
    low, high = axes.dataLim.ymin, statistics.median(thick["loss"].iloc[len(thick) // 4] for thick in medians)
    if not math.isnan(target := results.targets[condition]):
        low, high = min(low, target), max(high, target)
        axes.axhline(target, color="0.45", linewidth=1, linestyle=(0, (6, 3)))
        label, at = f"target {target:.3f}", axes.get_yaxis_transform()
        axes.annotate(label, (0.01, target), (0, -2), at, "offset points", va="top", fontsize=8.5, color="0.35")
    if high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    ends = [end for thick in medians if (end := thick[cost].iloc[-1]) > 0]
    if cost == "bytes" or (ends and max(ends) / min(ends) > LARGE_RATIO):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        first, last = axes.get_xlim()
        if last < 100 * first:  # one power of ten or none, and no other ticks have labels
            axes.xaxis.set_major_locator(MaxNLocator(4) if last < 10 * first else LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B" if cost == "bytes" else "", sep=""))
    axes.set(xlabel=AXES[cost], ylabel=f"validation loss ({results.unit.name})", title=plain_label(condition))
    _legend_below(figure)
    return figure


def median_curve(curves: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the median of curves by step. If they share fewer than half of the steps of the longest curve, as with
    timed rounds, interpolate all curves at the steps of the one that ends first, from where all have begun. If
    this leaves fewer than two steps and the curves share none, return the first curve."""
    curves = [curve.set_index("step") for curve in curves]
    shared = pd.concat(curves, axis=1, join="inner", keys=range(len(curves)))
    if 2 * len(shared) < max(map(len, curves)):
        begin, steps = max(curve.index[0] for curve in curves), min(curves, key=lambda curve: curve.index[-1]).index
        if len(steps := steps[steps >= begin]) > 1:
            columns = {
                (number, name): np.interp(steps, curve.index, values)
                for number, curve in enumerate(curves)
                for name, values in curve.items()
            }
            shared = pd.DataFrame(columns, steps)
    return shared.T.groupby(level=1).median().T if len(shared) else curves[0]


def draw_time(results: Results, condition: str) -> Figure | None:
    """Draw the training time of each run as a bar of computing, exposed communication and waiting. The bar shows the
    seed with the upper median of the times."""
    trials = results.trials[results.trials["condition"] == condition].dropna(subset=SPLIT)
    if trials.empty:
        return None
    # The medians of the parts would come from different seeds, and their sum would be the time of no trial.
    by_run = trials.groupby("run", sort=False)[SPLIT]
    parts = pd.DataFrame(
        {plain_label(run): rows.loc[rows.sum(axis=1).sort_values().index[len(rows) // 2]] for run, rows in by_run}
    ).T
    figure, axes = _figure(1.5 + 0.34 * len(parts))
    ends = parts.cumsum(axis=1)
    for name, kind in SPLIT_KINDS.items():
        color, label = KINDS[kind]
        bars = axes.barh(parts.index, parts[name], left=ends[name] - parts[name], color=color, label=label, height=0.68)
    totals = ends["waiting"]
    idle = 100 * (1 - parts["computing"] / totals).fillna(0)
    axes.bar_label(bars, [f"{t:.1f} s, {i:.0f} % idle" for t, i in zip(totals, idle, strict=True)], padding=4, size=8)
    axes.set(xlabel="training time (s), mean of ranks", title=plain_label(condition), xlim=(0, totals.max() * 1.5 or 1))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    _legend_below(figure, columns=2)
    return figure


def draw_throughput(results: Results, sweep: Sweep) -> Figure | None:
    """Draw tokens per second of each run over the number in which the conditions differ. Error bars span the seeds."""
    rates = results.runs["tokens_per_second"].dropna().reset_index()
    numbers = sorted(filter(math.isfinite, sweep.numbers.values()))
    is_log = numbers[0] > 0 and numbers[-1] / numbers[0] > LARGE_RATIO
    # A condition without a number is drawn beyond an end of the axis: the upper end for rates, otherwise the lower end.
    below, above = min(0.0, 2 * numbers[0] - numbers[1]), 2 * numbers[-1] - numbers[-2]
    if is_log:
        below, above = numbers[0] ** 2 / numbers[1], numbers[-1] ** 2 / numbers[-2]
    positions = pd.Series(sweep.numbers).replace({math.inf: above, -math.inf: below}).sort_values()
    rates = rates.assign(x=rates["condition"].map(positions)).dropna().sort_values("x", kind="stable")
    if rates.empty:
        return None
    figure, axes = _figure(4.6)
    for run, look in styles(results).items():
        if len(rows := rates[rates["run"] == run]):
            error = (rows["median"] - rows["low"], rows["high"] - rows["median"])
            axes.errorbar(rows["x"], rows["median"], error, **look, markersize=5, capsize=2, label=plain_label(run))
    axes.set_xscale("log" if is_log else "linear")
    labels = [
        f"{number:g}" if math.isfinite(number := sweep.numbers[name]) else plain_label(name) for name in positions.index
    ]
    axes.set_xticks(positions, labels)
    axes.minorticks_off()
    axes.set(xlabel=plain_label(sweep.label), ylabel="tokens per second, all ranks", ylim=(0, None))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _legend_below(figure)
    return figure


def draw_timelines(results: Results, condition: str) -> Figure | None:
    """Draw the first traced seed of each run, one run above the other, over the same number of seconds. Return None if
    no run is traced."""
    trials = results.trials[results.trials["condition"] == condition].dropna(subset="trial")
    traced: dict[str, pd.DataFrame] = {}
    for run, trial in zip(trials["run"], trials["trial"], strict=True):
        if len(trial.spans):
            traced.setdefault(run, trial.spans)
    if not traced:
        return None
    length = window_seconds(list(traced.values()))
    heights = [0.55 + 0.27 * min(MAX_RANKS, spans["rank"].nunique()) for spans in traced.values()]
    figure = Figure(figsize=(TIMELINE_WIDTH, sum(heights) + 1.1), layout="constrained")
    panels = figure.subplots(len(traced), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (run, spans) in zip(panels, traced.items(), strict=True):
        _draw_run(axes, run, spans, length)
        axes.tick_params(axis="x", length=0 if axes is not panels[-1] else 3.5)
    panels[-1].set_xlabel("seconds")
    _legend_below(figure, columns=4, handles=[Patch(color=color, label=label) for color, label in KINDS.values()])
    figure.suptitle(plain_label(condition), fontsize=12)
    return figure


def synchronizations(spans: pd.DataFrame) -> list[float]:
    """Return the times (Unix seconds) at which synchronizations began on the first traced rank, at most one per step. One
    begins with the step's first message or, in runs without background messages, with its first noticeable exposed wait."""
    first = spans[spans["rank"] == spans["rank"].min()]
    lengths = first["end"] - first["start"]
    begun = first[first["kind"] == "message"]
    if begun.empty:
        is_short = lengths < NOTICEABLE * lengths[first["kind"] == "step"].median()
        begun = first[(first["kind"] == "exposed") & ~is_short]
    return sorted(begun.groupby("step")["start"].first())


def window_seconds(traces: Sequence[pd.DataFrame]) -> float:
    """Return the length in seconds of every run's window: the longest that a run needs for ROUNDS rounds, but at most
    LONGEST times the median."""
    needed = []
    for spans in traces:
        starts, total = synchronizations(spans), spans["end"].max() - spans["start"].min()
        needed.append((starts[ROUNDS] - starts[0]) * (1 + 2 * MARGIN) if len(starts) > ROUNDS else total)
    return min(max(needed), LONGEST * statistics.median(needed))


def window_start(spans: pd.DataFrame, length: float) -> float:
    """Return the start of a run's window: just before the first synchronization that has a full window, or else
    `length` seconds before the end."""
    begin, end = spans["start"].min(), spans["end"].max()
    candidates = (start - MARGIN * length for start in synchronizations(spans))
    return next((at for at in candidates if at >= begin and at + length <= end), max(begin, end - length))


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _curve(trial: Trial, cost: str) -> pd.DataFrame:
    """Return the points with a finite loss by step, without those at 0 bytes, which a logarithmic axis can't show."""
    points = validations(trial)[["step", cost, "loss"]].dropna()
    return (points[points[cost] > 0] if cost == "bytes" else points).reset_index(drop=True)


def _legend_below(figure: Figure, columns: int = 3, handles: Sequence[Patch] | None = None) -> None:
    look = {"loc": "outside lower center", "fontsize": 8.5, "frameon": False, "handlelength": 2.6}
    figure.legend(handles=handles, ncols=columns, **look)


def _draw_run(axes: Axes, name: str, spans: pd.DataFrame, length: float) -> None:
    ranks, begin = sorted(spans["rank"].unique()), window_start(spans, length)
    shown = ranks[:MAX_RANKS]
    seen = spans[(spans["end"] > begin) & (spans["start"] < begin + length)]
    for position, rank in enumerate(shown):
        for kind, (color, _) in KINDS.items():
            own = seen[(seen["rank"] == rank) & (seen["kind"] == kind)]
            top, height, alpha = (0.18, 0.18, 0.6) if kind == "message" else (-0.4, 0.52, 1)
            bars = list(zip(own["start"] - begin, own["end"] - own["start"], strict=True))
            axes.broken_barh(bars, (position + top, height), facecolors=color, alpha=alpha, linewidth=0, zorder=2)
            if kind == "step":
                starts = own["start"] - begin
                axes.vlines(starts, position - 0.4, position + 0.12, colors="black", linewidth=0.6, zorder=3)
    left_out = f" ({len(shown)} of {len(ranks)} ranks)" if len(shown) < len(ranks) else ""
    axes.set_title(plain_label(f"{name}{left_out}"), loc="left", fontsize=10)
    axes.set(xlim=(0, length), ylim=(len(shown) - 0.5, -0.5))
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
