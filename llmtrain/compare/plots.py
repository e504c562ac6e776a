"""Pictures of a comparison: losses against what they cost, where the time went, throughput over conditions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from llmtrain.compare import formatting, measures
from llmtrain.compare.aggregate import ConditionResult, Results, RunResult
from llmtrain.compare.measures import ValidationPoint
from llmtrain.compare.results import DONE, Trial
from llmtrain.compare.sweep_axis import Scale

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8b4513"),
    *("#7f3fbf", "#c4102f", "#4d6a6d", "#8fae1b"),
)
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X<>hp"
COMPUTING, EXPOSED, WAITING = "#9ecae1", "#f28e2b", "#c4302b"
Curve = list[tuple[float, float]]
WIDTH = 5.2
"""Inches: a picture is as legible in a phone's width as in a third of a desk's."""
LARGE_RATIO = 8.0
"""Runs whose costs differ by more are drawn over a logarithmic axis."""


@dataclass(frozen=True)
class Style:
    """How a run is drawn, in every picture the same."""

    color: str
    line: str
    marker: str


@dataclass(frozen=True)
class Axis:
    """What a loss is set against."""

    name: str
    label: str
    cost: Callable[[ValidationPoint], float | None]
    is_log: bool = False


AXES = (
    Axis("tokens", "tokens of all replicas", lambda validation: validation.cost.tokens),
    Axis("seconds", "training time (s)", lambda validation: validation.cost.seconds),
    Axis("bytes", "bytes sent between replicas", lambda validation: validation.cost.bytes, is_log=True),
)


def styles(results: Results) -> dict[str, Style]:
    """The baseline is black; eleven others have a color of their own, and every one a marker and a dash."""
    others = [run for run in results.runs if run != results.baseline]
    made = {results.baseline: Style("black", "-", "o")}
    for number, run in enumerate(others):
        line, marker = LINES[number // 4 % len(LINES)], MARKERS[(number + 1) % len(MARKERS)]
        made[run] = Style(COLOURS[number % len(COLOURS)], line, marker)
    return made


def draw_loss(condition: ConditionResult, axis: Axis, styles: dict[str, Style]) -> Figure | None:
    """Validation loss against `axis`: each seed thin, their median thick. None where nobody has a point of it."""
    figure, axes = _figure(4.6)
    drawn = [curves for run in condition.runs if (curves := _draw_run(axes, run, axis, styles[run.run]))]
    if not drawn:
        return None
    losses = [loss for curves in drawn for curve in curves for _, loss in curve]
    if condition.target is not None:
        _draw_target(axes, condition.target)
        losses.append(condition.target)
    early = statistics.median(curves[0][len(curves[0]) // 4][1] for curves in drawn)
    _limit(axes, min(losses), early if condition.target is None else max(early, condition.target))
    _scale_x(axes, axis, [curves[0][-1][0] for curves in drawn])
    axes.set(xlabel=axis.label, ylabel="validation loss (nats per token)", title=condition.name)
    _legend_below(figure, *axes.get_legend_handles_labels())
    return figure


def _draw_run(axes: Axes, run: RunResult, axis: Axis, style: Style) -> list[Curve]:
    """All seeds of a run. Returns what was drawn, the thick curve first."""
    curves = {id(trial): _curve(trial, axis) for trial in run.trials}
    whole = [curves[id(trial)] for trial in run.done if curves[id(trial)]]
    middle = _middle(whole) if len(whole) > 1 else None
    thin = [curve for curve in curves.values() if curve]
    if not thin:
        return []
    thick = middle or (whole or thin)[0]
    look = {"color": style.color, "linestyle": style.line}
    for curve in thin:
        axes.plot(*zip(*curve, strict=True), **look, linewidth=0.9, alpha=0.45)
    axes.plot(*zip(*thick, strict=True), **look, marker=style.marker, markersize=4.5, linewidth=1.7, label=run.run)
    for trial in run.trials:
        if trial.state != DONE and curves[id(trial)]:
            axes.plot(*curves[id(trial)][-1], "x", color=style.color, markersize=11, markeredgewidth=2.5)
    return [thick, *thin]


def _draw_target(axes: Axes, target: float) -> None:
    axes.axhline(target, color="0.45", linewidth=1, linestyle=(0, (6, 3)))
    axes.annotate(
        f"target {formatting.loss(target)}",
        (0.01, target),
        xycoords=("axes fraction", "data"),
        xytext=(0, -2),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
        color="0.35",
    )


def draw_time(condition: ConditionResult) -> Figure | None:
    """Bars of the training time of each run: computing, exposed communication, waiting; medians over seeds."""
    rows = []
    for run in condition.runs:
        splits = [split for trial in run.measured if (split := measures.time_split(trial)) is not None]
        if splits:
            parts = [[split.computing, split.exposed, split.waiting] for split in splits]
            rows.append((run.run, [statistics.median(column) for column in zip(*parts, strict=True)]))
    if not rows:
        return None
    figure, axes = _figure(1.5 + 0.34 * len(rows))
    names = [name for name, _ in rows]
    left = [0.0] * len(rows)
    labels = ("computing", "communication that was not hidden", "waiting for the slowest")
    for index, (label, color) in enumerate(zip(labels, (COMPUTING, EXPOSED, WAITING), strict=True)):
        values = [parts[index] for _, parts in rows]
        axes.barh(names, values, left=left, color=color, label=label, height=0.68)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for row, (total, (_, parts)) in enumerate(zip(left, rows, strict=True)):
        idle = f", {formatting.percent(1 - parts[0] / total)} idle" if total else ""
        axes.annotate(
            f"{formatting.seconds(total)}{idle}",
            (total, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=8,
        )
    axes.set(xlabel="training time (s), mean of ranks", title=condition.name, xlim=(0, max(left) * 1.5 or 1))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    _legend_below(figure, *axes.get_legend_handles_labels(), columns=2)
    return figure


def draw_throughput(results: Results, scale: Scale, styles: dict[str, Style]) -> Figure | None:
    """Tokens per second of each run over the number in which the conditions differ; bars span the seeds."""
    figure, axes = _figure(4.6)
    numbers = sorted(number for number in scale.numbers.values() if number is not None)
    is_log = numbers[0] > 0 and numbers[-1] / numbers[0] > LARGE_RATIO
    positions = {name: _position(number, numbers, scale, is_log) for name, number in scale.numbers.items()}
    drawn = []
    for run in results.runs:
        points = []
        for condition in results.conditions:
            if condition.name not in positions:
                continue
            result = next((result for result in condition.runs if result.run == run), None)
            spread = result.rate if result else None
            if spread is not None:
                points.append((positions[condition.name], spread))
        if not points:
            continue
        points.sort(key=lambda point: point[0])
        middle = [spread.median for _, spread in points]
        below = [spread.median - spread.low for _, spread in points]
        above = [spread.high - spread.median for _, spread in points]
        style = styles[run]
        drawn.append(
            axes.errorbar(
                [x for x, _ in points],
                middle,
                (below, above),
                color=style.color,
                linestyle=style.line,
                marker=style.marker,
                markersize=5,
                capsize=2,
                label=run,
            )
        )
    if not drawn:
        return None
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(
        sorted(positions.values()), [_tick(name, scale) for name in sorted(positions, key=positions.__getitem__)]
    )
    axes.minorticks_off()
    axes.set(xlabel=scale.label, ylabel="tokens per second, all ranks", ylim=(0, None))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    _legend_below(figure, drawn, [line.get_label() for line in drawn])
    return figure


def _position(number: float | None, numbers: Sequence[float], scale: Scale, is_log: bool) -> float:
    """On the axis; a condition without a number stands beyond the end where its network or delay belongs."""
    if number is not None:
        return number
    if scale.is_rate:
        return numbers[-1] ** 2 / numbers[-2] if is_log else 2 * numbers[-1] - numbers[-2]
    return numbers[0] ** 2 / numbers[1] if is_log else 0.0  # which has no place on a logarithmic axis


def _tick(name: str, scale: Scale) -> str:
    number = scale.numbers[name]
    return name if number is None else f"{number:g}"


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _curve(trial: Trial, axis: Axis) -> Curve:
    """Points with a finite loss; those at no bytes have no place on a logarithmic axis."""
    points = ((axis.cost(validation), validation.loss) for validation in measures.validations(trial))
    return [(x, y) for x, y in points if x is not None and y is not None and (x > 0 or not axis.is_log)]


def _middle(curves: Sequence[Curve]) -> Curve | None:
    """Median over seeds point by point; None where seeds have different numbers of validations."""
    if len({len(curve) for curve in curves}) != 1:
        return None
    columns = zip(*curves, strict=True)
    return [(statistics.median(x for x, _ in points), statistics.median(y for _, y in points)) for points in columns]


def _limit(axes: Axes, low: float, high: float) -> None:
    """From the lowest loss to where most runs were after a quarter of their validations, or the target if that is higher: ends
    are what one compares."""
    if high > low:
        axes.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))


def _scale_x(axes: Axes, axis: Axis, ends: Sequence[float]) -> None:
    positive = [end for end in ends if end > 0]
    if axis.is_log or (positive and max(positive) / min(positive) > LARGE_RATIO):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    unit = "B" if axis.name == "bytes" else ""
    axes.xaxis.set_major_formatter(EngFormatter(unit=unit, sep=""))


def _legend_below(figure: Figure, handles: Sequence[object], labels: Sequence[object], columns: int = 3) -> None:
    figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, fontsize=8.5, frameon=False, handlelength=2.6
    )
