"""Write the page of the study from its records: benchmarks/results/study/README.md and its figures.

python benchmarks/study/study_page.py --write
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_plan import (
    BATCH,
    FINAL_SEEDS,
    ROUNDS_OF_ITS_OWN,
    SHORTENED,
    STAGES,
    TRIALS,
    Cell,
    Records,
    Run,
    Setting,
    best_of,
    loss_of,
    runs_of,
    trials,
)
from study_runs import RECIPE, RECORDS, read_records
from table import ROOT, Row, markdown, parser, show

from llmtrain.plan.model_size import size_of
from llmtrain.plan.time_estimate import HardwareRates, TimeEstimate, estimate_time
from llmtrain.recipe_loader import load_recipe

COLUMNS = (
    "method",
    "best trial",
    "loss",
    "± seeds",
    "to synchronous",
    "worth",
    "bits per byte",
    "rounds",
    "sent",
    "chosen",
)
BY_ROUNDS = ("diloco", "local_sgd", "edit")
"""Methods whose losses are listed by number of rounds."""
GAPS = "Gap against the number of rounds"
SPEEDS = "Speed to the same loss, by network"
MESSAGES = (0.1, 1.0, 10.0, 100.0)
"""Time of one message in fp32, in steps: the networks of the table of speeds."""
BY_SEED = "Differences to Local SGD, seed by seed"
FIRST = "With a warm-up of 5 % of the steps"
FIRST_RECORDS = RECORDS.parent / "short_warmup.jsonl"
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
VOCABULARY = 1024
TEXT = """\
Llama with 0.32 M parameters on Python files, 6.4 M tokens, one epoch: what was decided before the first run is in
[PROTOCOL.md](../../study/PROTOCOL.md). Losses are of validation, in nats per token, of the replicas' mean at the end of a run.
`best trial` is the lowest of {trials} trials with about a quarter of the tokens; `loss` is the mean of {seeds} seeds with all
tokens and that trial's setting, and `± seeds` half of the distance between the lowest and the highest; it leaves
out the luck of tuning, because trials compare settings with one seed. `to synchronous` compares
with the synchronous runs of the same number of replicas, batch and inner optimizer. `worth` is the share of the tokens with
which synchronous training, annealed on them, reaches the same loss (interpolated between the means of runs with {shares} of the
tokens, all with the full run's warm-up; the range is that of the method's seeds). `sent` is the sum of what all replicas send. Cells
without a loss are not complete; if a seed diverged, there is no mean."""
SPEEDS_TEXT = """\
How many times as fast as synchronous training a method reaches the loss that it ends with, if a message of the whole model in
fp32 takes so many steps' time. Losses are measured (`worth`). Times are predicted as by `llmtrain recipe show`, whose error was
at most 2.8 points of utilization in [measurements](../network) with a model of 2.5 M parameters and messages of up to 21 steps; the last
column is extrapolated. Above 1, the method pays. Cells whose `worth` is not known or below the smallest measured share have no row."""
FIRST_TEXT = """\
These runs were made first, as the protocol said then. Warm-up is 10 steps in trials and 39 in final runs. Later probes showed
that this is far too short, and that trials chose learning rates by how well they stand it
([PROTOCOL.md](../../study/PROTOCOL.md), amendments). Cells without a loss for every seed have no row. All records are in
[short_warmup.jsonl](short_warmup.jsonl)."""


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
        return f"{diverged} of {len(losses)} diverged" if is_complete else "", *[""] * 6
    other = mean_loss(synchronous_beside(cell), done)
    gap = "" if other is None or cell == synchronous_beside(cell) else f"{loss / other - 1:+.1%}"
    bits, rounds, sent = (
        statistics.mean(record[key] for record in finals) for key in ("bits_per_byte", "rounds", "bytes")
    )
    spread = (max(losses) - min(losses)) / 2
    return (
        f"{loss:.4f}",
        f"{spread:.4f}",
        gap,
        worth_text(cell, done),
        f"{bits:.4f}",
        f"{rounds:.0f}",
        f"{sent / 1e6:.0f} MB",
    )


def synchronous_beside(cell: Cell) -> Cell:
    """Return the cell of synchronous training with which a cell is compared."""
    inner = "muon" if cell.method == "muloco" else cell.inner
    return Cell("synchronous", cell.replicas, 30, cell.batch, inner)


def losses_by_share(cell: Cell, done: Records) -> dict[float, list[float]]:
    """Return the losses of a cell's final and shorter runs so far, by the share of the tokens that they have."""
    losses: dict[float, list[float]] = {}
    for run in runs_of(cell, done):
        if run.kind != "trial" and run.id in done:
            losses.setdefault(run.share_of_tokens, []).append(loss_of(done[run.id]))
    return losses


def worth(loss: float, cell: Cell, done: Records) -> float | None:
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


def worth_text(cell: Cell, done: Records) -> str:
    """Return a cell's worth with its range over the seeds, or nothing if it is the measure itself or not known."""
    losses = [loss_of(record) for record in finals_of(cell, done)]
    found = [worth(loss, cell, done) for loss in (statistics.mean(losses), max(losses), min(losses))]
    if cell == synchronous_beside(cell) or None in found:
        return ""
    smallest = f"{100 * min(losses_by_share(synchronous_beside(cell), done)):.0f}"
    if found[0] == 0:
        return f"below {smallest} %"
    middle, low, high = (f"{100 * share:.0f}" if share else f"below {smallest}" for share in found)
    return f"{middle} % ({low} to {high})"


def speed_rows(done: Records) -> list[Row]:
    """Return, for each complete cell of the first two stages, how many times as fast as synchronous training it reaches its loss, by
    the time of a message."""
    rows = []
    for cell in (*STAGES["main"], *STAGES["together"]):
        loss = mean_loss(cell, done)
        if loss is None or cell.method == "synchronous" or not (share := worth(loss, cell, done)):
            continue
        times = [(time_of(synchronous_beside(cell), done, steps), time_of(cell, done, steps)) for steps in MESSAGES]
        rows.append((cell.label, *(f"{share * beside.run / own.run:.2f}" for beside, own in times)))
    return rows


def time_of(cell: Cell, done: Records, message_steps: float) -> TimeEstimate:
    """Return the estimated times of a cell's final run in units of a synchronous step, if a message of the model in fp32 takes
    `message_steps` of them, with a process per replica."""
    final = next(run for run in runs_of(cell, done) if run.kind == "final")
    overrides = [*final.overrides(), "parallel.in_process=false", "parallel.shards=1"]
    recipe = load_recipe(ROOT / RECIPE, overrides)
    size = size_of(recipe, VOCABULARY)
    sent = 8 * 2 * (cell.replicas - 1) / cell.replicas * 4 * size.parameters
    flops = recipe.train.tokens_per_step * size.flops_per_token / cell.replicas
    return estimate_time(recipe, size, cell.replicas, 1, HardwareRates(flops, mbit=sent / message_steps / 1e6))


def seed_rows(done: Records) -> list[Row]:
    """Return the differences of each complete cell of the main stage to Local SGD with the same seed."""
    cells = {cell.label: cell for cell in STAGES["main"] if mean_loss(cell, done) is not None}
    if "local_sgd" not in cells:
        return []
    averaged = [loss_of(record) for record in finals_of(cells.pop("local_sgd"), done)]
    rows = []
    for label, cell in cells.items():
        losses = [loss_of(record) for record in finals_of(cell, done)]
        differences = [loss - other for loss, other in zip(losses, averaged, strict=True)]
        rows.append((label, *(f"{each:+.4f}" for each in (*differences, statistics.mean(differences)))))
    return rows


def rounds_rows(done: Records) -> list[Row]:
    """Return the complete cells of `BY_ROUNDS` with 4 replicas and their usual batch, by method and number of rounds."""
    rows = []
    for cell in (cell for stage in ("main", "rounds", "together") for cell in STAGES[stage]):
        loss, spread, gap, _, _, rounds, sent = figures_of(cell, done)
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
        other = mean_loss(synchronous_beside(cell), done)
        if cell.method == "diloco" and loss is not None and other is not None:
            fit, base = (scale * PARAMETERS**power for scale, power in (FIT[cell.replicas], FIT[0]))
            rows.append((cell.replicas, (str(cell.replicas), f"{loss / other - 1:+.1%}", f"{fit / base - 1:+.1%}")))
    return [row for _, row in sorted(rows)]


def has_figure(done: Records) -> bool:
    """Return whether there is a loss to draw."""
    return any(mean_loss(cell, done) is not None for cell in STAGES["main"])


def draw(done: Records, path: Path) -> None:
    """Draw the losses of the main stage: a point per seed, methods from the best to the worst, and lines at the mean losses of
    shorter synchronous runs."""
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
    for share, losses in losses_by_share(synchronous_beside(cells[0]), done).items() if cells else ():
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
    [measure, shares], *_ = SHORTENED.items()
    lengths = sorted(Run(measure, "shorter", 0, Setting(0.0), share).share_of_tokens for share in (*shares, 1.0))
    *shorter, longest = (f"{100 * length:.0f}" for length in lengths)
    intro = TEXT.format(trials=TRIALS, seeds=len(FINAL_SEEDS), shares=f"{', '.join(shorter)} and {longest} %")
    return "\n\n".join(["# Does it pay? Losses of all methods, tuned alike", made_by(done), intro, *sections]) + "\n"


def first_rows(first: Records) -> list[Row]:
    """Return the complete cells of the runs with a short warm-up."""
    rows = []
    for cell in STAGES["main"]:
        if (loss := mean_loss(cell, first)) is not None:
            losses = [loss_of(record) for record in finals_of(cell, first)]
            other = mean_loss(synchronous_beside(cell), first)
            gap = "" if cell == synchronous_beside(cell) or other is None else f"{loss / other - 1:+.1%}"
            chosen = " ".join(key.removeprefix("sync.") for key in finals_of(cell, first)[0]["keys"])
            rows.append((cell.label, f"{loss:.4f}", f"{(max(losses) - min(losses)) / 2:.4f}", gap, chosen))
    return rows


def main() -> None:
    """Print the tables, and with --write also the page."""
    options = parser(__doc__).parse_args()
    done, first, tables = read_records(), read_records(FIRST_RECORDS), []
    for stage, cells in STAGES.items():
        rows = [row for cell in cells if (row := row_of(cell, done)) is not None]
        if rows:
            show(TITLES[stage], COLUMNS, rows)
            figure = f"![]({FIGURE})\n\n" if stage == "main" and has_figure(done) else ""
            tables.append((TITLES[stage], figure + markdown(COLUMNS, rows)))
    seeds = tuple(f"seed {seed}" for seed in FINAL_SEEDS)
    for title, text, columns, rows in (
        (SPEEDS, SPEEDS_TEXT, ("method", *(f"{steps:g} steps" for steps in MESSAGES)), speed_rows(done)),
        (BY_SEED, "", ("method", *seeds, "mean"), seed_rows(done)),
    ):
        if rows:
            show(title, columns, rows)
            tables.append((title, f"{text}\n\n{markdown(columns, rows)}".lstrip()))
    if len(by_rounds := rounds_rows(done)) > 1:
        columns = ("method", "H", "synchronous steps", "rounds", *COLUMNS[2:5], "sent")
        show(GAPS, columns, by_rounds)
        tables.append((GAPS, markdown(columns, by_rounds)))
    if formulas := formula_rows(done):
        columns = ("replicas", "DiLoCo to synchronous", "published fit")
        show("Beside the published fit", columns, formulas)
        tables.append(("Beside the fit of arXiv 2503.09799, extrapolated to this size", markdown(columns, formulas)))
    if rows := first_rows(first):
        columns = ("method", "loss", "± seeds", "to synchronous", "chosen")
        show(FIRST, columns, rows)
        tables.append((FIRST, f"{FIRST_TEXT}\n\n{markdown(columns, rows)}"))
    if options.write:
        (RECORDS.parent / "README.md").write_text(page(done, tables))
        if has_figure(done):
            draw(done, RECORDS.parent / FIGURE)


if __name__ == "__main__":
    main()
