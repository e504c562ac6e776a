"""Write the page of the study from its records: benchmarks/results/study/README.md and its figures.

python benchmarks/study/study_page.py --write
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_plan import BATCH, FINAL_SEEDS, ROUNDS_OF_ITS_OWN, STAGES, TRIALS, Cell, Records, best_of, loss_of, trials
from study_runs import RECORDS, read_records
from table import Row, markdown, parser, show

COLUMNS = ("method", "best trial", "loss", "± seeds", "to synchronous", "bits per byte", "rounds", "sent", "chosen")
BY_ROUNDS = ("diloco", "local_sgd", "edit")
"""Methods whose losses are listed by number of rounds."""
GAPS = "Gap against the number of rounds"
FIGURE = "losses.png"
TITLES = {
    "main": "All methods, 4 replicas, H = 30",
    "together": "The first 8 % of the steps synchronous, 4 replicas, H = 30",
    "replicas": "Numbers of replicas, H = 30",
    "rounds": "Lengths of rounds, 4 replicas",
    "batch": "Other batches, 4 replicas, H = 30",
}
FIT = {0: (18.129, -0.0953), 1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""(A, alpha) of the fits A N^alpha of arXiv 2503.09799 to the losses of DiLoCo with so many replicas; 0: data parallel."""
PARAMETERS = 320_000
TEXT = """\
Llama with 0.32 M parameters on Python files, 6.4 M tokens, one epoch: what was decided before the first run is in
[PROTOCOL.md](../../study/PROTOCOL.md). Losses are of validation, in nats per token, of the replicas' mean at the end of a run.
`best trial` is the lowest of {trials} trials with a quarter of the tokens; `loss` is the mean of {seeds} seeds with all tokens and
that trial's setting, and `± seeds` half of the distance between the lowest and the highest. `to synchronous` compares with the
synchronous runs of the same number of replicas and the same batch. `sent` is the sum of what all replicas send. Cells
without a loss are not complete; if a seed diverged, there is no mean."""


def finals_of(cell: Cell, done: Records) -> list[Mapping[str, Any]]:
    """Return the records of a cell's final runs."""
    ids = [f"{cell.name}-final-{seed:02}" for seed in FINAL_SEEDS]
    return [done[name] for name in ids if name in done]


def mean_loss(cell: Cell, done: Records) -> float | None:
    """Return the mean loss of a cell's final runs, or None unless all are done and none diverged."""
    losses = [loss_of(record) for record in finals_of(cell, done)]
    return statistics.mean(losses) if len(losses) == len(FINAL_SEEDS) and all(map(math.isfinite, losses)) else None


def row_of(cell: Cell, done: Records) -> Row | None:
    """Return a cell's row, or None if nothing of it is done."""
    tried = [run for run in trials(cell, done) if run.id in done]
    if not tried:
        return None
    best = best_of(tried, done)
    every = "" if cell.method in ROUNDS_OF_ITS_OWN else f", H = {cell.every}"
    label = f"{cell.label}, M = {cell.replicas}{every}, batch {cell.batch}"
    count = "" if len(tried) == TRIALS else f" ({len(tried)} of {TRIALS})"
    trial = f"{loss_of(done[best.id]):.4f}{count}"
    chosen = " ".join(key.removeprefix("sync.") for key in done[best.id]["keys"])
    return label, trial, *figures_of(cell, done), chosen


def figures_of(cell: Cell, done: Records) -> Row:
    """Return loss, spread, gap to synchronous training, bits per byte, rounds and traffic of a cell's final runs. They are empty
    unless all runs are done. If some diverged, the loss says how many, and the others are empty."""
    finals = finals_of(cell, done)
    losses = [loss_of(record) for record in finals]
    if (loss := mean_loss(cell, done)) is None:
        is_complete, diverged = len(losses) == len(FINAL_SEEDS), losses.count(math.inf)
        return f"{diverged} of {len(losses)} diverged" if is_complete else "", *[""] * 5
    other = mean_loss(Cell("synchronous", cell.replicas, cell.every, cell.batch), done)
    gap = "" if other is None or cell.label == "synchronous" else f"{loss / other - 1:+.1%}"
    bits, rounds, sent = (
        statistics.mean(record[key] for record in finals) for key in ("bits_per_byte", "rounds", "bytes")
    )
    spread = (max(losses) - min(losses)) / 2
    return f"{loss:.4f}", f"{spread:.4f}", gap, f"{bits:.4f}", f"{rounds:.0f}", f"{sent / 1e6:.0f} MB"


def rounds_rows(done: Records) -> list[Row]:
    """Return the complete cells of `BY_ROUNDS` with 4 replicas and their usual batch, by method and number of rounds."""
    rows = []
    for cell in (cell for stage in ("main", "rounds", "together") for cell in STAGES[stage]):
        loss, spread, gap, _, rounds, sent = figures_of(cell, done)
        if cell.method in BY_ROUNDS and (cell.replicas, cell.batch) == (4, BATCH[4]) and loss:
            row = (cell.label, str(cell.every), f"{cell.together:.0%}", rounds, loss, spread, gap, sent)
            rows.append((BY_ROUNDS.index(cell.method), float(rounds or "inf"), row))
    return [row for *_, row in sorted(rows)]


def formula_rows(done: Records) -> list[Row]:
    """Return DiLoCo's loss by number of replicas, to that of synchronous training with the same batch, beside the published
    fit."""
    rows = []
    for cell in (*STAGES["replicas"], *STAGES["main"]):
        loss = mean_loss(cell, done)
        other = mean_loss(Cell("synchronous", cell.replicas, cell.every, cell.batch), done)
        if cell.method == "diloco" and loss is not None and other is not None:
            fit, base = (scale * PARAMETERS**power for scale, power in (FIT[cell.replicas], FIT[0]))
            rows.append((cell.replicas, (str(cell.replicas), f"{loss / other - 1:+.1%}", f"{fit / base - 1:+.1%}")))
    return [row for _, row in sorted(rows)]


def has_figure(done: Records) -> bool:
    """Return whether there is a loss to draw."""
    return any(mean_loss(cell, done) is not None for cell in STAGES["main"])


def draw(done: Records, path: Path) -> None:
    """Draw the losses of the main stage: a point per seed, methods from the best to the worst."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [cell for cell in STAGES["main"] if mean_loss(cell, done) is not None]
    cells.sort(key=lambda cell: -mean_loss(cell, done))
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.35 * len(cells)), layout="constrained")
    for height, cell in enumerate(cells):
        losses = [loss_of(record) for record in finals_of(cell, done)]
        axes.plot(losses, [height] * len(losses), "o", color="C0", alpha=0.6)
        axes.plot([statistics.mean(losses)], [height], "|", color="black", markersize=14)
    axes.set_yticks(range(len(cells)), [cell.label for cell in cells])
    axes.set_xlabel("validation loss (nats per token), three seeds and their mean")
    axes.grid(axis="x", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def made_by(done: Records) -> str:
    """Return the line about commits, versions and machines of the runs."""
    parts = []
    for key in ("commit", "torch", "cpu"):
        counted = Counter(record[key] for record in done.values())
        parts.append(f"{key} " + ", ".join(f"{value} ({count} runs)" for value, count in counted.most_common()))
    return f"`python benchmarks/study/study_page.py --write` from [runs.jsonl](runs.jsonl): {'; '.join(parts)}"


def page(done: Records, tables: Sequence[tuple[str, str]]) -> str:
    """Return the page."""
    sections = [f"## {title}\n\n{table}" for title, table in tables]
    intro = TEXT.format(trials=TRIALS, seeds=len(FINAL_SEEDS))
    return "\n\n".join(["# Does it pay? Losses of all methods, tuned alike", made_by(done), intro, *sections]) + "\n"


def main() -> None:
    """Print the tables, and with --write also the page."""
    options = parser(__doc__).parse_args()
    done, tables = read_records(), []
    for stage, cells in STAGES.items():
        rows = [row for cell in cells if (row := row_of(cell, done)) is not None]
        if rows:
            show(TITLES[stage], COLUMNS, rows)
            figure = f"![]({FIGURE})\n\n" if stage == "main" and has_figure(done) else ""
            tables.append((TITLES[stage], figure + markdown(COLUMNS, rows)))
    if len(by_rounds := rounds_rows(done)) > 1:
        columns = ("method", "H", "synchronous steps", "rounds", *COLUMNS[2:5], "sent")
        show(GAPS, columns, by_rounds)
        tables.append((GAPS, markdown(columns, by_rounds)))
    if formulas := formula_rows(done):
        columns = ("replicas", "DiLoCo to synchronous", "published fit")
        show("Beside the published fit", columns, formulas)
        tables.append(("Beside the fit of arXiv 2503.09799, extrapolated to this size", markdown(columns, formulas)))
    if options.write:
        (RECORDS.parent / "README.md").write_text(page(done, tables))
        if has_figure(done):
            draw(done, RECORDS.parent / FIGURE)


if __name__ == "__main__":
    main()
