"""Figures of the study's page: losses by method, losses over bytes sent, speeds, and a heat map of outer settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_losses import (
    equal_loss_share,
    losses_by_seed,
    losses_by_share,
    mean_loss,
    mean_of,
    name_of,
    records_by_share,
    synchronous_beside,
)
from study_plan import FINAL_SEEDS, ROUNDS_OF_ITS_OWN, Cell, Records, loss_of
from study_stages import SHORTENED, STAGES
from study_times import MEASURED, step_speed, timed_cells
from table import Row

DRAWN = tuple(10 ** (exponent / 8) for exponent in range(-8, 17))
"""Times of a message, in steps, in the figure of speeds."""
HIGHEST, LABEL_DISTANCE = 3.8, 0.026
"""Highest loss in the figure over bytes, and the least distance of its labels."""
HOTTEST = 3.7
"""Loss above which the heat map's color no longer changes."""


def draw_losses(done: Records, path: Path) -> None:
    """Draw the losses of the main stage: a point per seed, methods from the best to the worst, and lines at the mean losses of
    shorter synchronous runs."""
    cells = [cell for cell in STAGES["main"] if mean_loss(cell, done) is not None]
    cells.sort(key=lambda cell: -mean_loss(cell, done))
    figure, axes = _subplots(figsize=(7, 0.6 + 0.35 * len(cells)))
    for height, cell in enumerate(cells):
        losses = losses_by_seed(cell, done)
        axes.plot(losses, [height] * len(losses), "o", color=_color(cell), alpha=0.6)
        axes.plot([statistics.mean(losses)], [height], "|", color="black", markersize=14)
    by_share = losses_by_share(synchronous_beside(cells[0]), done) if cells else {}
    for share, losses in by_share.items():
        if share < 1 and len(losses) == len(FINAL_SEEDS):
            axes.axvline(statistics.mean(losses), color="gray", linestyle=":")
            what = f"synchronous,\n{100 * share:.0f} % of the tokens"
            axes.annotate(
                what, (statistics.mean(losses), len(cells) - 0.4), ha="center", va="bottom", fontsize=8, color="gray"
            )
    if any(share < 1 for share in by_share):  # losses far above those of the shortest runs would squeeze the others
        least, most = min(map(min, by_share.values())), max(map(max, by_share.values())) + 0.05
        axes.set_xlim(min([least, *(mean_loss(cell, done) for cell in cells)]) - 0.1, most)
        for height, cell in enumerate(cells):
            if (loss := mean_loss(cell, done)) > most:
                axes.annotate(f"{loss:.2f} →", (most, height), ha="right", va="center")
    axes.set_yticks(range(len(cells)), [name_of(cell) for cell in cells])
    axes.set_ylim(-0.6, len(cells) - 0.4)
    axes.set_xlabel("validation loss (nats per token), three seeds and their mean")
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def draw_speeds(done: Records, path: Path) -> None:
    """Draw how many times as fast as synchronous training each method with AdamW inside reaches its own final loss, over the time
    of a message, with a band for the range over the seeds."""
    figure, axes = _subplots(figsize=(8, 4.6))
    usual = [cell for cell in timed_cells(done) if cell.every == 30 and not cell.variant]
    own = [cell for cell in usual if not cell.together and not synchronous_beside(cell).inner]
    curves = {
        cell: [equal_loss_share(mean_loss(cell, done), cell, done) * step_speed(cell, done, steps) for steps in DRAWN]
        for cell in own
    }
    cells = sorted(curves, key=lambda cell: -curves[cell][-1])
    for cell, style in zip(cells, _styles(len(cells)), strict=True):
        axes.plot(DRAWN, curves[cell], label=f"{name_of(cell)}: {mean_loss(cell, done):.2f}", **style)
        losses, middle = losses_by_seed(cell, done), equal_loss_share(mean_loss(cell, done), cell, done)
        ends = [equal_loss_share(loss, cell, done) / middle for loss in (max(losses), min(losses))]
        bounds = ([end * speed for speed in curves[cell]] for end in ends)
        axes.fill_between(DRAWN, *bounds, color=style["color"], alpha=0.08, linewidth=0)
    axes.axhline(1, color="black", linewidth=1)
    axes.axvspan(MEASURED, DRAWN[-1], color="black", alpha=0.05, linewidth=0)
    axes.annotate("extrapolated", (MEASURED, 0.3), xytext=(3, 0), textcoords="offset points", fontsize=8, color="gray")
    axes.annotate("synchronous training", (DRAWN[0], 1), xytext=(2, 3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.25, 0.5, 1, 2, 5, 10, 20, 50], ["¼", "½", "1", "2", "5", "10", "20", "50"])
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_xlabel("time of one all-reduce of the gradients in fp32, in steps (slower networks to the right)")
    axes.set_ylabel("speed to the method's final loss, synchronous = 1")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9, title="final loss")
    _save(figure, path)


def draw_bytes(done: Records, path: Path) -> None:
    """Draw the mean loss of each complete cell with 4 replicas over the bytes that it sent, with a line through synchronous
    runs of fewer tokens."""
    figure, axes = _subplots(figsize=(8, 4.6))
    cells = [cell for stage in ("main", "gradients", "together", "rounds") for cell in STAGES[stage]]
    cells = [cell for cell in cells if mean_loss(cell, done) is not None and cell != synchronous_beside(cell)]
    labels: dict[int, float] = {}
    for cell in sorted(cells, key=lambda cell: mean_loss(cell, done)):
        sent, loss = mean_of(cell, "bytes", done), mean_loss(cell, done)
        axes.plot([sent], [loss], "o", color=_color(cell))
        rounds = "" if cell.every == 30 or cell.method in ROUNDS_OF_ITS_OWN else f", H = {cell.every}"
        column = round(4 * math.log10(sent))  # labels at similar numbers of bytes are stacked
        labels[column] = max(loss, labels.get(column, 0.0) + LABEL_DISTANCE)
        axes.annotate(f"{name_of(cell)}{rounds}", (1.06 * sent, labels[column]), va="center", fontsize=8)
    for cell in (cell for cell in SHORTENED if cell.length == 1):
        points = sorted(
            (statistics.mean(one["bytes"] for one in records), statistics.mean(map(loss_of, records)))
            for records in records_by_share(cell, done).values()
            if len(records) == len(FINAL_SEEDS)
        )
        if points:
            axes.plot(*zip(*points, strict=True), ":.", color=_color(cell))
            axes.annotate(
                f"{cell.label}, fewer tokens to the left",
                points[-1],
                xytext=(4, 6),
                textcoords="offset points",
                fontsize=8,
                ha="right",
            )
    axes.set_ylim(top=min(axes.get_ylim()[1], HIGHEST))
    axes.set_xscale("log")
    axes.set_xlabel("bytes sent by all replicas (losses above the figure are in the table)")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_heat(rows: Sequence[Row], rates: Sequence[float], path: Path) -> None:
    """Draw the heat map of `heat_rows`: a color and a number for each outer learning rate and momentum."""
    figure, axes = _subplots(figsize=(6, 0.8 + 0.5 * len(rows)))
    losses = [[float(loss) if loss != "diverged" else math.inf for loss in row[1:]] for row in rows]
    lowest = min(map(min, losses))
    axes.imshow(losses, cmap="viridis", vmin=lowest, vmax=HOTTEST, aspect="auto")
    for height, row in enumerate(rows):
        for place, loss in enumerate(row[1:]):
            color = "white" if losses[height][place] < (lowest + HOTTEST) / 2 else "black"
            weight = "bold" if losses[height][place] == lowest else "normal"
            axes.text(place, height, loss, ha="center", va="center", color=color, weight=weight)
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.set_xlabel("outer learning rate")
    axes.set_ylabel("outer momentum")
    _save(figure, path)


def _color(cell: Cell) -> str:
    """Return the color of a cell's inner optimizer."""
    return "C1" if synchronous_beside(cell).inner else "C0"


def _styles(count: int) -> Sequence[dict[str, object]]:
    """Return line styles that can be told apart without color, too."""
    dashes = ("-", "--", ":", "-.")
    return [{"color": f"C{index % 10}", "linestyle": dashes[index % 4]} for index in range(count)]


def _subplots(**options: Any) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(layout="constrained", **options)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
