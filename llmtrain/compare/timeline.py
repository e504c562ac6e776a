"""What every rank did in a few rounds, from trace spans: where it computed, waited, and what was under way meanwhile."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from llmtrain.compare.aggregate import ConditionResult
from llmtrain.compare.results import Span, Trial

Spans = dict[int, list[Span]]

WIDTH = 12.0
MAX_RANKS = 8
"""Rows of one run; more are not legible."""
ROUNDS = 2
"""Whole rounds in a window, so that three synchronizations are in it."""
LONGEST = 3.0
"""A window is at most so many times the one that the median run asks for."""
NOTICEABLE = 0.01
"""Of a step: a shorter standstill only found that there was nothing to wait for."""
MARGIN = 0.12
"""Fraction of the window that lies before its first synchronization."""

KINDS = {
    "step": ("#e8e8e8", "rest of a step"),
    "data": ("#b8a9d9", "reading data"),
    "gradient": ("#9ecae1", "computing"),
    "delay": ("#5f6b73", "injected delay"),
    "exposed": ("#f28e2b", "communication, training stands still"),
    "wait": ("#c4302b", "waiting for the slowest"),
}
"""Inner ones after outer ones: they are drawn over them."""
MESSAGE, MESSAGE_LABEL = "#1b7837", "message under way in the background"


@dataclass(frozen=True)
class TimelineRow:
    """A traced run in a picture: its spans and where its window begins (Unix seconds)."""

    name: str
    spans: Spans
    start: float


def draw_timelines(condition: ConditionResult) -> Figure | None:
    """Runs one above the other over the same number of seconds; None where none was traced."""
    traced = [(run.run, trial.spans) for run in condition.runs if (trial := _traced(run.trials)) is not None]
    if not traced:
        return None
    length = window_seconds([spans for _, spans in traced])
    rows = [TimelineRow(name, spans, window_start(spans, length)) for name, spans in traced]
    heights = [0.55 + 0.27 * min(MAX_RANKS, len(row.spans)) for row in rows]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1.1), layout="constrained")
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, row in zip(panels, rows, strict=True):
        _draw_run(axes, row, length)
        axes.tick_params(axis="x", length=0 if axes is not panels[-1] else 3.5)
    panels[-1].set_xlabel("seconds")
    patches = [Patch(color=color, label=label) for color, label in KINDS.values()]
    patches.append(Patch(color=MESSAGE, label=MESSAGE_LABEL))
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(condition.name, fontsize=12)
    return figure


def synchronizations(spans: Spans) -> list[float]:
    """When synchronizations began on the first traced rank (Unix seconds): one a step in which a message started, or, in
    runs without messages in the background, in which training stood still for a noticeable while."""
    first = spans[min(spans)]
    kind = "message" if any(span.kind == "message" for span in first) else "exposed"
    steps = [span.end - span.start for span in first if span.kind == "step"]
    shortest = NOTICEABLE * statistics.median(steps) if steps and kind == "exposed" else 0.0
    begun: dict[int, float] = {}
    for span in first:
        if span.kind == kind and span.end - span.start >= shortest:
            begun.setdefault(span.step, span.start)
    return sorted(begun.values())


def window_seconds(traces: Sequence[Spans]) -> float:
    """One length for all: the longest that a run needs for its rounds, unless that dwarfs the others."""
    needed = [_needed(spans) for spans in traces]
    return min(max(needed), LONGEST * statistics.median(needed))


def window_start(spans: Spans, length: float) -> float:
    """Just before the first synchronization that has a full window after it, else the last `length` seconds."""
    begin, end = _extent(spans)
    for start in synchronizations(spans):
        candidate = start - MARGIN * length
        if candidate >= begin and candidate + length <= end:
            return candidate
    return max(begin, end - length)


def _needed(spans: Spans) -> float:
    begin, end = _extent(spans)
    starts = synchronizations(spans)
    if len(starts) <= ROUNDS:
        return end - begin
    return (starts[ROUNDS] - starts[0]) * (1 + 2 * MARGIN)


def _extent(spans: Spans) -> tuple[float, float]:
    whole = [span for ranks in spans.values() for span in ranks]
    return min(span.start for span in whole), max(span.end for span in whole)


def _traced(trials: Sequence[Trial]) -> Trial | None:
    return next((trial for trial in trials if trial.spans), None)


def _draw_run(axes: Axes, row: TimelineRow, length: float) -> None:
    ranks = sorted(row.spans)[:MAX_RANKS]
    for position, rank in enumerate(ranks):
        seen = [span for span in row.spans[rank] if span.end > row.start and span.start < row.start + length]
        for kind, (color, _) in KINDS.items():
            bars = _bars(seen, kind, row.start)
            axes.broken_barh(bars, (position - 0.4, 0.52), facecolors=color, linewidth=0, zorder=2)
        starts = [span.start - row.start for span in seen if span.kind == "step"]
        axes.vlines(starts, position - 0.4, position + 0.12, colors="black", linewidth=0.6, zorder=3)
        messages = _bars(seen, "message", row.start)
        axes.broken_barh(messages, (position + 0.18, 0.18), facecolors=MESSAGE, alpha=0.6, linewidth=0, zorder=2)
    left_out = f" ({len(ranks)} of {len(row.spans)} ranks)" if len(ranks) < len(row.spans) else ""
    axes.set_title(f"{row.name}{left_out}", loc="left", fontsize=10)
    axes.set(xlim=(0, length), ylim=(len(ranks) - 0.5, -0.5), yticks=range(len(ranks)))
    axes.set_yticklabels([f"rank {rank}" for rank in ranks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _bars(spans: Sequence[Span], kind: str, origin: float) -> list[tuple[float, float]]:
    return [(span.start - origin, span.end - span.start) for span in spans if span.kind == kind]
