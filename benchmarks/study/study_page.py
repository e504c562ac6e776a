"""Write the page of the study from its records, benchmarks/results/study/README.md, its figures, and the tables
in docs/results.md and README.md.

python benchmarks/study/study_page.py --write
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import study_texts as texts
from study_benchmarks import BENCHMARK_RECORDS, benchmark_rows
from study_elastic import ELASTIC_RECORDS, elastic_rows
from study_faults import fault_rows
from study_figures import draw_bytes, draw_heat, draw_losses, draw_speeds
from study_losses import (
    figures_of,
    finals_of,
    losses_by_seed,
    mean_loss,
    mean_of,
    synchronous_beside,
    text_rows,
)
from study_plan import (
    BATCH,
    FINAL_SEEDS,
    ROUNDS_OF_ITS_OWN,
    TRIALS,
    Cell,
    Records,
    Run,
    Setting,
    best_of,
    loss_of,
    trials,
)
from study_probes import PROBES
from study_runs import RECORDS, read_records
from study_stages import HEAT, HEAT_STEPS, SHORTENED, STAGES, runs_of
from study_summary import published_gap, write_summaries
from study_times import (
    MESSAGES,
    break_even_rows,
    speed_rows,
    step_rows,
    uneven_rows,
)
from table import Row, markdown, parser, show

BILLION = 1e9
BY_ROUNDS = ("diloco", "local_sgd", "edit")
"""Methods whose losses are listed by number of rounds."""
HEAT_RATES = tuple(dict.fromkeys(rate for rate, *_ in HEAT_STEPS))
FIRST_RECORDS = RECORDS.parent / "short_warmup.jsonl"
LOSSES, BYTES, CURVES, HEAT_MAP = "losses.png", "bytes.png", "speeds.png", "heat.png"


def row_of(cell: Cell, done: Records) -> Row | None:
    """Return a cell's row, or None if nothing of it is done. A cell without trials of its own has no best one."""
    has_trials = cell.tuned == cell
    tried = [run for run in trials(cell.tuned, done) if run.id in done]
    if not tried or not (has_trials or finals_of(cell, done)):
        return None
    best = best_of(tried, done)
    every = "" if cell.method in ROUNDS_OF_ITS_OWN else f", H = {cell.every}"
    label = f"{cell.label}, M = {cell.replicas}{every}, batch {cell.batch}"
    count = "" if len(tried) == TRIALS else f" ({len(tried)} of {TRIALS})"
    trial = f"{loss_of(done[best.id]):.4f}{count}" if has_trials else ""
    settings = done[best.id] if has_trials else finals_of(cell, done)[0]
    keys = {key.partition("=")[0]: key.removeprefix("sync.") for key in settings["keys"]}  # the last of each counts
    chosen = " ".join(keys.values())
    return label, trial, *figures_of(cell, done), chosen


def seed_rows(done: Records) -> list[Row]:
    """Return the differences of each complete cell of the main stage to Local SGD with the same seed."""
    cells = {cell.label: cell for cell in STAGES["main"] if mean_loss(cell, done) is not None}
    if "local_sgd" not in cells:
        return []
    averaged = losses_by_seed(cells.pop("local_sgd"), done)
    rows = []
    for label, cell in cells.items():
        differences = [loss - other for loss, other in zip(losses_by_seed(cell, done), averaged, strict=True)]
        rows.append((label, *(f"{each:+.4f}" for each in (*differences, statistics.mean(differences)))))
    return rows


def trained_rows(done: Records) -> list[Row]:
    """Return the last training losses of the complete cells of the main stage and of the longer runs, beside their validation
    losses."""
    rows = []
    for cell in (*STAGES["main"], *STAGES["long"]):
        beside = synchronous_beside(cell)
        if mean_loss(cell, done) is not None and mean_loss(beside, done) is not None:
            loss, gap = mean_of(cell, "train_loss", done), figures_of(cell, done)[2]
            above = f"{loss / mean_of(beside, 'train_loss', done) - 1:+.1%}" if gap else ""
            rows.append((cell.label, f"{loss:.4f}", above, gap))
    return rows


def heat_rows(done: Records) -> list[Row]:
    """Return DiLoCo's losses by outer setting, if all are there: a row for each momentum and its warm-up, a column for each outer
    learning rate."""
    [(cell, _)] = HEAT.items()
    runs = [run for run in runs_of(cell, done) if run.kind == "heat"]
    if not runs or any(run.id not in done for run in runs):
        return []
    rows: dict[str, list[str]] = {}
    for run, (_, momentum, warmup) in zip(runs, HEAT_STEPS, strict=True):
        of_step = rows.setdefault(f"{momentum:g}" + (f", warmed up over {warmup} rounds" if warmup else ""), [])
        of_step.append(f"{loss:.4f}" if math.isfinite(loss := loss_of(done[run.id])) else "diverged")
    return [(label, *losses) for label, losses in rows.items()]


def probe_rows(done: Records) -> list[Row]:
    """Return the name, seed, steps, loss and keys of the single runs that have been made."""
    return [
        (run.id, str(run.seed), str(run.steps), f"{loss_of(done[run.id]):.4f}", " ".join(done[run.id]["keys"]))
        for run in PROBES
        if run.id in done
    ]


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
            rows.append(
                (
                    cell.replicas,
                    (
                        str(cell.replicas),
                        f"{loss / other - 1:+.1%}",
                        published_gap(cell.replicas),
                        published_gap(cell.replicas, BILLION),
                    ),
                )
            )
    return [row for _, row in sorted(rows)]


def made_by(done: Records) -> str:
    """Return the line about commits, versions and machines of the runs."""
    parts = []
    for key in ("commit", "torch", "cpu"):
        counted = Counter(record[key] for record in done.values())
        parts.append(f"{key} " + ", ".join(f"{value} ({count} runs)" for value, count in counted.most_common()))
    return f"`python benchmarks/study/study_page.py --write` from [runs.jsonl](runs.jsonl): {'; '.join(parts)}"


def first_rows(first: Records) -> list[Row]:
    """Return the complete cells of the runs with a short warm-up."""
    rows = []
    for cell in STAGES["main"]:
        if (loss := mean_loss(cell, first)) is not None:
            losses = losses_by_seed(cell, first)
            other = mean_loss(synchronous_beside(cell), first)
            gap = "" if cell == synchronous_beside(cell) or other is None else f"{loss / other - 1:+.1%}"
            chosen = " ".join(key.removeprefix("sync.") for key in finals_of(cell, first)[0]["keys"])
            rows.append((cell.label, f"{loss:.4f}", f"{(max(losses) - min(losses)) / 2:.4f}", gap, chosen))
    return rows


def tables_of(done: Records, first: Records) -> list[tuple[str, str, Sequence[str], list[Row]]]:
    """Return the title, the text above it, the columns and the rows of every table; tables without rows are left out."""
    found = []
    for stage, cells in STAGES.items():
        rows = [row for cell in cells if (row := row_of(cell, done)) is not None]
        figure = f"![]({LOSSES})\n\n![]({BYTES})" if stage == "main" else ""
        if rows:
            found.append((texts.TITLES[stage], figure, texts.COLUMNS, rows))
    networks = ("method", *(f"{steps:g} steps" for steps in MESSAGES))
    seeds = ("method", *(f"seed {seed}" for seed in FINAL_SEEDS), "mean")
    rates = ("momentum", *(f"learning rate {rate:g}" for rate in HEAT_RATES))
    by_rounds = ("method", "H", "synchronous steps", "rounds", *texts.COLUMNS[2:5], "sent")
    fit = ("replicas", "DiLoCo to synchronous", "published fit", "the fit for 1 B parameters")
    of_clocks = ("clock", "method", "loss ± seeds", *texts.COLUMNS[4:6], "time", "speed to its loss")
    short = ("method", "loss", "± seeds", "to synchronous", "chosen")
    found += [
        (texts.STEPS, texts.STEPS_TEXT, networks, step_rows(done)),
        (texts.SPEEDS, f"{texts.SPEEDS_TEXT}\n\n![]({CURVES})", networks, speed_rows(done)),
        (
            texts.EVEN,
            texts.EVEN_TEXT,
            ("method", "fp32", "int8", "int8, also the method's messages"),
            break_even_rows(done),
        ),
        (
            texts.TRAINED,
            texts.TRAINED_TEXT,
            ("method", "loss", "to synchronous", "validated, to synchronous"),
            trained_rows(done),
        ),
        (texts.BY_SEED, "", seeds, seed_rows(done)),
        (texts.GAPS, "", by_rounds, rows if len(rows := rounds_rows(done)) > 1 else []),
        (texts.UNEVEN, texts.UNEVEN_TEXT, of_clocks, uneven_rows(done)),
        (texts.ELASTIC, texts.ELASTIC_TEXT, texts.ELASTIC_COLUMNS, elastic_rows(read_records(ELASTIC_RECORDS))),
        (texts.BENCHMARKS, texts.BENCHMARKS_TEXT, *benchmark_rows(read_records(BENCHMARK_RECORDS), done)),
        (texts.HEATS, f"{texts.HEATS_TEXT.format(seed=FINAL_SEEDS[0])}\n\n![]({HEAT_MAP})", rates, heat_rows(done)),
        ("Beside the fit of arXiv 2503.09799, extrapolated to this size", "", fit, formula_rows(done)),
        (texts.SITES, texts.SITES_TEXT, texts.SITES_COLUMNS, text_rows(STAGES["sites"], done)),
        (texts.FAULTS, texts.FAULTS_TEXT, texts.FAULTS_COLUMNS, fault_rows(done)),
        (texts.SINGLE, texts.SINGLE_TEXT, ("run", "seed", "steps", "loss", "keys"), probe_rows(done)),
        (texts.FIRST, texts.FIRST_TEXT, short, first_rows(first)),
    ]
    return [table for table in found if table[-1]]


def page(done: Records, tables: Sequence[tuple[str, str, Sequence[str], list[Row]]]) -> str:
    """Return the Markdown of the page: where its records come from, what its columns mean, and the tables."""
    sections = [
        "\n\n".join(filter(None, (f"## {title}", text, markdown(columns, rows))))
        for title, text, columns, rows in tables
    ]
    [measure, shares], *_ = SHORTENED.items()
    lengths = sorted(Run(measure, "shorter", 0, Setting(0.0), share).share_of_tokens for share in (*shares, 1.0))
    *shorter, longest = (f"{100 * length:.0f}" for length in lengths)
    intro = texts.TEXT.format(trials=TRIALS, seeds=len(FINAL_SEEDS), shares=f"{', '.join(shorter)} and {longest} %")
    title = "# Does it pay? Losses of all methods, with the same number of trials"
    return "\n\n".join([title, made_by(done), intro, *sections]) + "\n"


def main() -> None:
    """Print the tables, and with --write also write the page, the figures and the tables in docs/results.md and README.md."""
    options = parser(__doc__).parse_args()
    done, first = read_records(), read_records(FIRST_RECORDS)
    tables = tables_of(done, first)
    for title, _, columns, rows in tables:
        show(title, columns, rows)
    if options.write:
        (RECORDS.parent / "README.md").write_text(page(done, tables))
        draw_losses(done, RECORDS.parent / LOSSES)
        draw_bytes(done, RECORDS.parent / BYTES)
        draw_speeds(done, RECORDS.parent / CURVES)
        if heat := heat_rows(done):
            draw_heat(heat, HEAT_RATES, RECORDS.parent / HEAT_MAP)
        write_summaries(done)


if __name__ == "__main__":
    main()
