"""Figures of the study's page: losses of all methods, and their speed over the network's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_losses import losses_by_seed, losses_by_share, mean_loss, synchronous_beside, worth
from study_plan import FINAL_SEEDS, STAGES, Records
from study_times import step_speed, timed_cells

DRAWN = tuple(10 ** (exponent / 8) for exponent in range(-8, 17))
"""Times of a message, in steps, that are drawn."""


def draw_losses(done: Records, path: Path) -> None:
    """Draw the losses of the main stage: a point per seed, methods from the best to the worst, and lines at the mean losses of
    shorter synchronous runs."""
    cells = [cell for cell in STAGES["main"] if mean_loss(cell, done) is not None]
    cells.sort(key=lambda cell: -mean_loss(cell, done))
    figure, axes = _subplots(figsize=(7, 0.6 + 0.35 * len(cells)))
    for height, cell in enumerate(cells):
        losses = losses_by_seed(cell, done)
        axes.plot(losses, [height] * len(losses), "o", color="C0", alpha=0.6)
        axes.plot([statistics.mean(losses)], [height], "|", color="black", markersize=14)
    by_share = losses_by_share(synchronous_beside(cells[0]), done) if cells else {}
    for share, losses in by_share.items():
        if share < 1 and len(losses) == len(FINAL_SEEDS):
            axes.axvline(statistics.mean(losses), color="gray", linestyle=":")
            what = f"synchronous, {100 * share:.0f} % of the tokens "
            axes.annotate(
                what, (statistics.mean(losses), len(cells) - 0.4), ha="right", va="bottom", fontsize=8, color="gray"
            )
    axes.set_yticks(range(len(cells)), [cell.label for cell in cells])
    axes.set_ylim(-0.6, len(cells) - 0.4)
    axes.set_xlabel("validation loss (nats per token), three seeds and their mean")
    axes.grid(axis="x", alpha=0.3)
    _save(figure, path)


def draw_speeds(done: Records, path: Path) -> None:
    """Draw how many times as fast as synchronous training each method reaches its loss, over the time of a message."""
    figure, axes = _subplots(figsize=(8, 4.6))
    curves = {
        cell: [worth(mean_loss(cell, done), cell, done) * step_speed(cell, done, steps) for steps in DRAWN]
        for cell in timed_cells(done)
        if not cell.together
    }
    cells = sorted(curves, key=lambda cell: -curves[cell][-1])
    for cell, style in zip(cells, _styles(len(cells)), strict=True):
        axes.plot(DRAWN, curves[cell], label=cell.label, **style)
    axes.axhline(1, color="black", linewidth=1)
    axes.annotate("synchronous training", (DRAWN[0], 1), xytext=(2, 3), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.25, 0.5, 1, 2, 5, 10, 20, 50], ["¼", "½", "1", "2", "5", "10", "20", "50"])
    axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.minorticks_off()
    axes.set_xlabel("time to send the model's gradients once, in steps (slower networks to the right)")
    axes.set_ylabel("speed to the method's final loss, synchronous = 1")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    _save(figure, path)


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
