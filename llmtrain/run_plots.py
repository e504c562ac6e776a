"""Pictures of runs, drawn from the lines of metrics.jsonl: one run with its rounds and costs, or several runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Lines = Sequence[Mapping[str, Any]]
"""Lines of one run, in order."""
Round = tuple[int, float]
"""Number of a round, from 1, and the tokens of all replicas at its end."""
MAX_MARKS = 30
"""Maximum number of marked synchronizations. If a run has more, only every second, fifth, tenth, ... is marked."""
MARKERS_UP_TO = 20
"""Maximum number of points for which a curve shows each point with a marker."""
TOKENS = "tokens of all replicas"
DPI = 130


def plain_label(name: str) -> str:
    """Return a label that matplotlib shows as it is. It reads text between two dollar signs as a formula, and leaves names that begin
    with an underscore out of legends."""
    shown = name.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown  # behind a space of no width


def draw_run(lines: Lines, target: Path, title: str) -> None:
    """Draw the losses of a run over its tokens, and below them the tokens per second and the bytes sent between replicas. Mark
    synchronizations and the synchronous warm-up. Write a PNG to `target`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(7.6, 5.8), layout="constrained")
    losses, costs = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.1))
    for axes in (losses, costs):
        _mark_phases(axes, lines)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    _plot_training_loss(losses, lines, color="C0", label="training")
    validations = _points(lines, "eval/loss")
    look = {"color": "C1", "linestyle": "--", "marker": "o" if len(validations[0]) <= MARKERS_UP_TO else ""}
    losses.plot(*validations, **look, markersize=4, label="validation")
    losses.set(ylabel="loss (nats per token)")
    losses.set_title(plain_label(title), fontsize=11)
    losses.legend(loc="upper right", fontsize=9, framealpha=0.9)
    costs.plot(*_points(lines, "perf/tokens_per_second"), color="C2", linewidth=1.2)
    costs.set_ylim(bottom=0)
    costs.set_ylabel("tokens per second", color="C2", fontsize=9)
    costs.set_xlabel(TOKENS)
    costs.set_xlim(left=0)
    _count_in_thousands(costs)
    costs.yaxis.set_major_formatter(EngFormatter(sep=""))
    _add_steps_axis(losses, lines)
    _add_bytes_axis(costs, lines)
    figure.savefig(target, dpi=DPI)


def draw_runs(runs: Mapping[str, Lines], target: Path, tag: str, unit: str, note: str = "") -> None:
    """Draw the training losses of several runs and their validation results (`tag`, in `unit`) over tokens, side by
    side. Write a PNG to `target`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6 + 0.2 * (len(runs) // 3)), layout="constrained")
    training, validation = figure.subplots(1, 2)
    for number, (name, lines) in enumerate(runs.items()):
        look = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10 % 4]}
        _plot_training_loss(training, lines, **look)
        points = _points(lines, tag)
        marker = "o" if len(points[0]) <= MARKERS_UP_TO else ""
        validation.plot(*points, **look, marker=marker, markersize=4, label=plain_label(name))
    training.set(title="training", ylabel="loss (nats per token)")
    validation.set(title="validation", ylabel=unit)
    for axes in (training, validation):
        axes.set(xlabel=TOKENS)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        _count_in_thousands(axes)
    if note:
        figure.suptitle(note, fontsize=10, color="C3")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(target, dpi=DPI)


def ends_of_rounds(lines: Lines) -> list[Round]:
    """Return the rounds that have ended. A round ends where the next one starts, which follows from any line of the next round. If
    rounds have no line, their ends are spaced evenly. The last round ends with the run."""
    ends: list[Round] = []
    for earlier, later in _round_changes(lines):
        first, last = max(int(earlier["sync/round"]), 1), int(later["sync/round"])
        begin, end = _start_of_first(earlier, later), _start_of_round(later)
        ends += [(n, begin + (n + 1 - first) / (last - first) * (end - begin)) for n in range(first, last)]
    marked = _with_rounds(lines)
    if marked and 0 < marked[-1]["sync/round"] == marked[-1].get("sync/count"):
        ends.append((int(marked[-1]["sync/round"]), marked[-1]["tokens"]))
    return ends


def end_of_warmup(lines: Lines) -> float:
    """Return the tokens at which the synchronous warm-up ended and the first round began; 0 if the run has no warm-up or only
    synchronous steps."""
    starts = (_start_of_first(*change) for change in _round_changes(lines) if change[0]["sync/round"] == 0)
    return next(starts, 0.0)


def _with_rounds(lines: Lines) -> Lines:
    return [line for line in lines if line.get("sync/round") is not None]


def _round_changes(lines: Lines) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Yield pairs of neighboring lines whose second line is in a later round than the first."""
    for earlier, later in itertools.pairwise(_with_rounds(lines)):
        if later["sync/round"] > earlier["sync/round"]:
            yield earlier, later


def _start_of_round(line: Mapping[str, Any]) -> float:
    """Return the tokens at which a line's round began, assuming that all steps have the same number of tokens. In timed rounds,
    this holds on average."""
    return line["tokens"] * (1 - line["sync/round_step"] / line["step"])


def _start_of_first(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> float:
    """Return the tokens at which the earlier line's round began. If the earlier line is synchronous, return the tokens at which the
    first round began, assuming that all rounds before the later line's are as long as that one."""
    if earlier["sync/round"] > 0:
        return _start_of_round(earlier)
    before = (later["sync/round"] - 1) * later["sync/period"] * later["tokens"] / later["step"]
    return max(earlier["tokens"], _start_of_round(later) - before)


def stride_of_marks(rounds: int) -> int:
    """Return the smallest n of 1, 2, 5, 10, 20, 50, ... with which marking every n-th of `rounds` rounds gives at most MAX_MARKS
    marks."""
    fits = (n * 10**power for power in range(20) for n in (1, 2, 5) if rounds <= MAX_MARKS * n * 10**power)
    return next(fits)


def _mark_phases(axes: Axes, lines: Lines) -> None:
    if warmup := end_of_warmup(lines):
        axes.axvspan(0, warmup, color="0.5", alpha=0.15, linewidth=0, label="synchronous warm-up")
    ends = ends_of_rounds(lines)
    stride, word = stride_of_marks(len(ends)), "synchronization"
    label = f"{word}s ({len(ends):,})" if stride == 1 else f"every {stride:,}th of {len(ends):,} {word}s"
    label = f"1 {word}" if len(ends) == 1 else label.replace("2th", "2nd")
    for number, tokens in ends:
        if number % stride == 0:
            axes.axvline(tokens, color="0.5", alpha=0.55, linewidth=0.8, linestyle=(0, (1, 2)), label=label, zorder=1)
            label = ""  # one entry in the legend


def _plot_training_loss(axes: Axes, lines: Lines, **look: Any) -> None:
    tokens, losses = _points(lines, "train/loss")
    marker = "." if len(tokens) <= MARKERS_UP_TO else ""
    axes.plot(tokens, losses, marker=marker, linewidth=1.2, **look)


def _points(lines: Lines, tag: str) -> tuple[list[float], list[float]]:
    """Return the tokens and the values of a tag, without lines that lack it."""
    points = [(line["tokens"], line[tag]) for line in lines if line.get(tag) is not None]
    return [tokens for tokens, _ in points], [value for _, value in points]


def _count_in_thousands(axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter

    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _add_steps_axis(axes: Axes, lines: Lines) -> None:
    """Add an axis of steps at the top. Every step trains on the same number of tokens, except in timed rounds,
    where this holds on average."""
    from matplotlib.ticker import EngFormatter

    last = max(lines, key=lambda line: line["tokens"], default=None)
    if last is None or not last["tokens"] or not last["step"]:
        return
    per_step = last["tokens"] / last["step"]
    top = axes.secondary_xaxis("top", functions=(lambda tokens: tokens / per_step, lambda steps: steps * per_step))
    top.set_xlabel("steps", fontsize=9)
    top.tick_params(labelsize=8)
    top.xaxis.set_major_formatter(EngFormatter(sep=""))


def _add_bytes_axis(axes: Axes, lines: Lines) -> None:
    """Add an axis of the bytes sent so far at the right, unless the run has only one replica."""
    from matplotlib.ticker import EngFormatter

    tokens, sent = _points(lines, "comm/bytes_total")
    if not any(sent):
        return
    right = axes.twinx()
    right.plot(tokens, sent, color="C3", linewidth=1.2, linestyle="--")
    right.set_ylim(bottom=0)
    right.set_ylabel("bytes between\nreplicas so far", color="C3", fontsize=9)
    right.yaxis.set_major_formatter(EngFormatter(unit="B", sep=""))
    right.spines["top"].set_visible(False)
