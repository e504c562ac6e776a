"""Timelines of all ranks over a few rounds, from trace spans: computing, waiting, and messages in flight."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmtrain.compare.measures import Results

WIDTH = 12.0
MAX_RANKS = 8
"""Maximum number of ranks in a picture, so that it stays legible."""
ROUNDS = 2
"""Number of complete rounds per window, which therefore shows three synchronizations."""
LONGEST = 3.0
"""Maximum length of a window, as a multiple of the length that the median run needs."""
NOTICEABLE = 0.01
"""Fraction of a step below which an exposed wait does not count as the start of a synchronization."""
MARGIN = 0.12
"""Fraction of the window that lies before its first synchronization."""

KINDS = {
    "step": ("#e8e8e8", "rest of a step"),
    "data": ("#b8a9d9", "reading data"),
    "gradient": ("#9ecae1", "computing"),
    "delay": ("#5f6b73", "injected delay"),
    "exposed": ("#f28e2b", "communication, training stands still"),
    "wait": ("#c4302b", "waiting for the slowest"),
    "message": ("#1b7837", "message in flight in the background"),
}
"""Color and label by kind of span. Inner spans come after the outer ones, because they are drawn over them."""


def draw_timelines(results: Results, condition: str) -> Figure | None:
    """Draw the first traced seed of each run, one above the other over the same number of seconds. None without any."""
    trials = results.trials[results.trials["condition"] == condition].dropna(subset="trial")
    traced: dict[str, pd.DataFrame] = {}
    for run, trial in zip(trials["run"], trials["trial"], strict=True):
        if len(trial.spans):
            traced.setdefault(run, trial.spans)
    if not traced:
        return None
    length = window_seconds(list(traced.values()))
    heights = [0.55 + 0.27 * min(MAX_RANKS, spans["rank"].nunique()) for spans in traced.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.1), layout="constrained")
    panels = figure.subplots(len(traced), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (run, spans) in zip(panels, traced.items(), strict=True):
        _draw_run(axes, run, spans, length)
        axes.tick_params(axis="x", length=0 if axes is not panels[-1] else 3.5)
    panels[-1].set_xlabel("seconds")
    patches = [Patch(color=color, label=label) for color, label in KINDS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(condition, fontsize=12)
    return figure


def synchronizations(spans: pd.DataFrame) -> list[float]:
    """Return when synchronizations began on the first traced rank (Unix seconds), at most one per step. One begins with
    the step's first message or, in runs without background messages, with its first noticeable exposed wait."""
    first = spans[spans["rank"] == spans["rank"].min()]
    lengths = first["end"] - first["start"]
    begun = first[first["kind"] == "message"]
    if begun.empty:
        begun = first[
            (first["kind"] == "exposed") & ~(lengths < NOTICEABLE * lengths[first["kind"] == "step"].median())
        ]
    return sorted(begun.groupby("step")["start"].first())


def window_seconds(traces: Sequence[pd.DataFrame]) -> float:
    """Return one length for all runs: the longest that a run needs for ROUNDS, but at most LONGEST times the median."""
    needed = []
    for spans in traces:
        starts, total = synchronizations(spans), spans["end"].max() - spans["start"].min()
        needed.append((starts[ROUNDS] - starts[0]) * (1 + 2 * MARGIN) if len(starts) > ROUNDS else total)
    return min(max(needed), LONGEST * statistics.median(needed))


def window_start(spans: pd.DataFrame, length: float) -> float:
    """Return a time just before the first synchronization with a full window, else `length` seconds before the end."""
    begin, end = spans["start"].min(), spans["end"].max()
    candidates = (start - MARGIN * length for start in synchronizations(spans))
    return next((at for at in candidates if at >= begin and at + length <= end), max(begin, end - length))


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
    axes.set_title(f"{name}{left_out}", loc="left", fontsize=10)
    axes.set(xlim=(0, length), ylim=(len(shown) - 0.5, -0.5))
    axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
