"""Plots of a comparison: loss against its costs, the parts of the training time, throughput over conditions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from llmtrain.compare import tables
from llmtrain.compare.measures import SPLIT, Results, Sweep, validations
from llmtrain.compare.results import DONE

COLORS = ["0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "8b4513", "7f3fbf", "c4102f", "4d6a6d", "8fae1b"]
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X<>hp"
SPLIT_COLORS = ("#9ecae1", "#f28e2b", "#c4302b")
SPLIT_LABELS = ("computing", "communication that was not hidden", "waiting for the slowest")
AXES = {"tokens": "tokens of all replicas", "seconds": "training time (s)", "bytes": "bytes sent between replicas"}
WIDTH = 5.2
"""Inches. A picture of this width is legible on a phone."""
LARGE_RATIO = 8.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""
Styles = dict[str, dict[str, Any]]
"""Line style of each run, the same in every picture."""


def styles(results: Results) -> Styles:
    """Return black for the baseline, and a color (the first eleven differ), marker and dash for each other run."""
    made = {results.baseline: {"color": "black", "linestyle": "-", "marker": "o"}}
    for number, run in enumerate(run for run in results.trials["run"].unique() if run != results.baseline):
        line, marker = LINES[number // 4 % len(LINES)], MARKERS[(number + 1) % len(MARKERS)]
        made[run] = {"color": f"#{COLORS[number % len(COLORS)]}", "linestyle": line, "marker": marker}
    return made


def draw_loss(results: Results, condition: str, cost: str, styles: Styles) -> Figure | None:
    """Draw validation loss against a cost: a thin line per seed, a thick one for the median. None without points."""
    figure, axes = _figure(4.6)
    trials = results.trials[results.trials["condition"] == condition].dropna(subset="trial")
    drawn = {}
    for run, rows in trials.groupby("run", sort=False):
        curves = {row.Index: curve for row in rows.itertuples() if len(curve := _curve(row.trial, cost))}
        if not curves:
            continue
        look = styles[run]
        for index, curve in curves.items():
            axes.plot(curve[cost], curve["loss"], **look | {"marker": ""}, linewidth=0.9, alpha=0.45)
            if rows["state"][index] != DONE:
                axes.plot(*curve.iloc[-1], "x", color=look["color"], markersize=11, markeredgewidth=2.5)
        done = [curve for index, curve in curves.items() if rows["state"][index] == DONE] or list(curves.values())
        thick = pd.concat(done).groupby(level=0).median() if len(set(map(len, done))) == 1 else done[0]
        axes.plot(thick[cost], thick["loss"], **look, markersize=4.5, linewidth=1.7, label=run)
        drawn[run] = (thick, min(curve["loss"].min() for curve in curves.values()))
    if not drawn:
        return None
    low = min(lowest for _, lowest in drawn.values())
    # From the lowest loss to the median after a quarter of the validations, because readers compare the ends.
    high = pd.Series([thick["loss"].iloc[len(thick) // 4] for thick, _ in drawn.values()]).median()
    if not math.isnan(target := results.targets[condition]):
        low, high = min(low, target), max(high, target)
        axes.axhline(target, color="0.45", linewidth=1, linestyle=(0, (6, 3)))
        label, at = f"target {tables.loss(target)}", axes.get_yaxis_transform()
        axes.annotate(label, (0.01, target), (0, -2), at, "offset points", va="top", fontsize=8.5, color="0.35")
    if high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    ends = [end for thick, _ in drawn.values() if (end := thick[cost].iloc[-1]) > 0]
    if cost == "bytes" or (ends and max(ends) / min(ends) > LARGE_RATIO):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(unit="B" if cost == "bytes" else "", sep=""))
    axes.set(xlabel=AXES[cost], ylabel="validation loss (nats per token)", title=condition)
    _legend_below(figure, *axes.get_legend_handles_labels())
    return figure


def draw_time(results: Results, condition: str) -> Figure | None:
    """Draw the median training time over seeds of each run as bars of computing, exposed communication and waiting."""
    parts = results.runs.loc[condition].xs("median", axis=1, level=1)[SPLIT].dropna()
    if parts.empty:
        return None
    figure, axes = _figure(1.5 + 0.34 * len(parts))
    ends = parts.cumsum(axis=1)
    for name, color, label in zip(SPLIT, SPLIT_COLORS, SPLIT_LABELS, strict=True):
        axes.barh(parts.index, parts[name], left=ends[name] - parts[name], color=color, label=label, height=0.68)
    totals = ends["waiting"]
    for row, (total, computing) in enumerate(zip(totals, parts["computing"], strict=True)):
        idle = f", {tables.percent(1 - computing / total)} idle" if total else ""
        axes.text(total, row, f"  {tables.seconds(total)}{idle}", va="center", size=8)
    axes.set(xlabel="training time (s), mean of ranks", title=condition, xlim=(0, totals.max() * 1.5 or 1))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    _legend_below(figure, *axes.get_legend_handles_labels(), columns=2)
    return figure


def draw_throughput(results: Results, sweep: Sweep, styles: Styles) -> Figure | None:
    """Draw tokens per second of each run over the number in which the conditions differ. Error bars span the seeds."""
    rates = results.runs["tokens_per_second"].dropna().reset_index()
    numbers = sorted(filter(math.isfinite, sweep.numbers.values()))
    is_log = numbers[0] > 0 and numbers[-1] / numbers[0] > LARGE_RATIO
    # A condition without a number is drawn beyond the end of the axis where its network or delay belongs.
    below, above = 0.0, 2 * numbers[-1] - numbers[-2]
    if is_log:
        below, above = numbers[0] ** 2 / numbers[1], numbers[-1] ** 2 / numbers[-2]
    positions = pd.Series(sweep.numbers).replace({math.inf: above, -math.inf: below}).sort_values()
    rates = rates.assign(x=rates["condition"].map(positions)).dropna().sort_values("x", kind="stable")
    if rates.empty:
        return None
    figure, axes = _figure(4.6)
    drawn = []
    for run, look in styles.items():
        if len(rows := rates[rates["run"] == run]):
            error = (rows["median"] - rows["low"], rows["high"] - rows["median"])
            drawn.append(axes.errorbar(rows["x"], rows["median"], error, **look, markersize=5, capsize=2, label=run))
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    labels = [f"{number:g}" if math.isfinite(number := sweep.numbers[name]) else name for name in positions.index]
    axes.set_xticks(positions, labels)
    axes.minorticks_off()
    axes.set(xlabel=sweep.label, ylabel="tokens per second, all ranks", ylim=(0, None))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _legend_below(figure, drawn, [line.get_label() for line in drawn])
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _curve(trial: Any, cost: str) -> pd.DataFrame:
    """Return the points with a finite loss, without those at 0 bytes, which a logarithmic axis can't show."""
    points = validations(trial)[[cost, "loss"]].dropna()
    return points[points[cost] > 0].reset_index(drop=True) if cost == "bytes" else points.reset_index(drop=True)


def _legend_below(figure: Figure, handles: Sequence[object], labels: Sequence[object], columns: int = 3) -> None:
    look = {"loc": "outside lower center", "fontsize": 8.5, "frameon": False, "handlelength": 2.6}
    figure.legend(handles, labels, ncols=columns, **look)
