"""Losses of the study's cells, and the share of the tokens with which synchronous training reaches them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from study_plan import FINAL_SEEDS, ROUNDS_OF_ITS_OWN, Cell, Records, loss_of
from study_stages import SHORTENED, runs_of
from table import Row


def finals_of(cell: Cell, done: Records) -> list[Mapping[str, Any]]:
    """Return the records of a cell's final runs."""
    ids = [f"{cell.name}-final-{seed:02}" for seed in FINAL_SEEDS]
    return [done[name] for name in ids if name in done]


def losses_by_seed(cell: Cell, done: Records) -> list[float]:
    """Return the losses of a cell's final runs so far, in the order of their seeds; infinity for a run that diverged."""
    return [loss_of(record) for record in finals_of(cell, done)]


def mean_loss(cell: Cell, done: Records) -> float | None:
    """Return the mean loss of a cell's final runs, or None unless all are done and none diverged."""
    losses = losses_by_seed(cell, done)
    return statistics.mean(losses) if len(losses) == len(FINAL_SEEDS) and all(map(math.isfinite, losses)) else None


def figures_of(cell: Cell, done: Records) -> Row:
    """Return loss, spread, gap to synchronous training, `share_text`, bits per byte, rounds and traffic of a cell's final runs.
    All are empty unless all runs are done. If some diverged, the loss says how many, and the others are empty."""
    losses = losses_by_seed(cell, done)
    if (loss := mean_loss(cell, done)) is None:
        is_complete, diverged = len(losses) == len(FINAL_SEEDS), losses.count(math.inf)
        return f"{diverged} of {len(losses)} diverged" if is_complete else "", *[""] * 6
    other = mean_loss(synchronous_beside(cell), done)
    gap = "" if other is None or cell == synchronous_beside(cell) else f"{loss / other - 1:+.1%}"
    bits, rounds, sent = (mean_of(cell, key, done) for key in ("bits_per_byte", "rounds", "bytes"))
    spread = (max(losses) - min(losses)) / 2
    return (
        f"{loss:.4f}",
        f"{spread:.4f}",
        gap,
        share_text(cell, done),
        f"{bits:.4f}",
        f"{rounds:.0f}",
        f"{sent / 1e6:.0f} MB",
    )


def synchronous_beside(cell: Cell) -> Cell:
    """Return the cell of synchronous training with which a cell is compared."""
    inner = "muon" if cell.method == "muloco" else cell.inner
    text = "mixture" if cell.text == "sites" else cell.text
    return Cell("synchronous", cell.replicas, 30, cell.batch, inner, length=cell.length, text=text)


def label_with_rounds(cell: Cell) -> str:
    """Return the cell's label, with the steps per round if they are not the usual 30."""
    has_rounds = cell.every != 30 and cell.method not in ROUNDS_OF_ITS_OWN
    return f"{cell.label}, H = {cell.every}" if has_rounds else cell.label


def name_of(cell: Cell) -> str:
    """Return the cell's name in figures: its label, which always names an inner optimizer other than AdamW."""
    is_hidden = synchronous_beside(cell).inner and not cell.inner
    return f"{cell.label} ({synchronous_beside(cell).inner} inside)" if is_hidden else cell.label


def mean_of(cell: Cell, key: str, done: Records) -> float:
    """Return the mean of a key's values in the records of a cell's final runs."""
    return statistics.mean(record[key] for record in finals_of(cell, done))


def text_rows(cells: Iterable[Cell], done: Records) -> list[Row]:
    """Return a row with the losses by text for each complete cell with two texts."""
    rows = []
    for cell in cells:
        loss, spread, gap, *_ = figures_of(cell, done)
        if loss and all("loss_by_text" in record for record in finals_of(cell, done)):
            of_text = [record["loss_by_text"] for record in finals_of(cell, done)]
            means = (statistics.mean(losses[name] for losses in of_text) for name in ("python", "tinystories"))
            rows.append((cell.method, cell.text, f"{loss} ± {spread}", gap, *(f"{mean:.4f}" for mean in means)))
    return rows


def records_by_share(cell: Cell, done: Records) -> dict[float, list[Mapping[str, Any]]]:
    """Return the records of a cell's final and shorter runs so far, by the share of the tokens that they have."""
    found: dict[float, list[Mapping[str, Any]]] = {}
    for run in runs_of(cell, done):
        if run.kind in ("final", "shorter") and run.id in done:
            found.setdefault(run.share_of_tokens, []).append(done[run.id])
    return found


def losses_by_share(cell: Cell, done: Records) -> dict[float, list[float]]:
    """Return the losses of `records_by_share`."""
    return {share: [*map(loss_of, records)] for share, records in records_by_share(cell, done).items()}


def equal_loss_share(loss: float, cell: Cell, done: Records) -> float | None:
    """Return the share of the tokens with which synchronous training reaches `loss`: interpolated in the logarithm of the share,
    at most 1, and 0 if it is below the smallest measured share. None unless all shorter synchronous runs beside the cell are
    done and finite."""
    beside = synchronous_beside(cell)
    losses = losses_by_share(beside, done)
    found = [loss for of_share in losses.values() for loss in of_share]
    if beside not in SHORTENED or len(found) < len(FINAL_SEEDS) * (1 + len(SHORTENED[beside])) or math.inf in found:
        return None
    points = sorted((statistics.mean(of_share), math.log(share)) for share, of_share in losses.items())
    lowest, highest = points[0], points[-1]
    if loss <= lowest[0]:
        return math.exp(lowest[1])
    if loss > highest[0]:
        return 0.0
    for (less, longer), (more, shorter) in pairwise(points):
        if less <= loss <= more:
            return math.exp(longer + (shorter - longer) * (loss - less) / (more - less))
    raise AssertionError("points are sorted")


def share_text(cell: Cell, done: Records) -> str:
    """Return a cell's `equal_loss_share` with its range over the seeds, or nothing if the cell is the reference itself or the share
    is not known."""
    losses = losses_by_seed(cell, done)
    found = [equal_loss_share(loss, cell, done) for loss in (statistics.mean(losses), max(losses), min(losses))]
    if cell == synchronous_beside(cell) or None in found:
        return ""
    smallest = f"{100 * min(losses_by_share(synchronous_beside(cell), done)):.0f}"
    if found[0] == 0:
        return f"below {smallest} %"
    middle, low, high = (f"{100 * share:.0f}" if share else f"below {smallest}" for share in found)
    return f"{middle} % ({low} to {high})"
