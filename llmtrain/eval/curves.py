"""Plots of scores over the course of training: one panel per score, one line per run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from llmtrain.eval.table import Evaluated, Row, rows_of

Point = tuple[float, float, float]
"""(tokens or steps, value, standard error); the standard error is 0 if unknown."""


def lines_of(evaluated: Sequence[Evaluated], row: Row, over_tokens: bool) -> dict[str, list[Point]]:
    """Return {run: points} for one score, in order of training."""
    lines: dict[str, list[Point]] = {}
    for each in evaluated:
        checkpoint, scores = each.checkpoint, each.entries[row.piece].scores.get(row.name, {})
        place = checkpoint.tokens if over_tokens else checkpoint.step
        value = scores.get(row.metric)
        if value is not None and place is not None:
            error = scores.get(f"{row.metric}_stderr") or 0.0
            lines.setdefault(checkpoint.label, []).append((place, value, error))
    return {label: sorted(points) for label, points in lines.items()}


def draw_curves(evaluated: Sequence[Evaluated], show: Mapping[str, Sequence[str]], title: str, target: Path) -> None:
    """Plot the scores with error bars of one standard error, and save the figure as a PNG.

    The x axis shows training tokens, or steps if the tokens of any checkpoint are unknown. A dashed line marks the
    chance level of accuracies.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = rows_of(evaluated, show)
    over_tokens = all(each.checkpoint.tokens is not None for each in evaluated)
    columns = min(3, len(rows))
    height = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * height), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(height, columns, squeeze=False).flat
    for panel in list(panels)[len(rows) :]:
        panel.set_visible(False)
    for row, panel in zip(rows, figure.axes, strict=False):
        for label, points in lines_of(evaluated, row, over_tokens).items():
            places, values, errors = zip(*points, strict=True)
            panel.errorbar(places, values, errors, marker="o", markersize=4, capsize=2, label=label)
        chance = evaluated[0].entries[row.piece].about[row.name].get("chance")
        if chance is not None and row.metric.startswith("acc"):
            panel.axhline(chance, linestyle="--", color="grey", label="chance")
        panel.set(title=row.name, ylabel=row.metric, xlabel="training tokens" if over_tokens else "steps")
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)
