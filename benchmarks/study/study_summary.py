"""The study's tables in docs/results.md and in README.md."""

from __future__ import annotations

from pathlib import Path

from study_losses import (
    equal_loss_share,
    figures_of,
    label_with_rounds,
    mean_loss,
    mean_of,
    synchronous_beside,
)
from study_plan import BATCH, Cell, Records
from study_stages import STAGES
from study_texts import (
    ALONE,
    CHANGES,
    CHANGES_TEXT,
    REACHED,
    REACHED_TEXT,
    README_COLUMNS,
    README_ROWS,
    SUMMARY,
    TEXT_NAMES,
)
from study_times import MESSAGES, reach_rows, step_speed, time_of, timed_cells, token_speed
from table import ROOT, Row, markdown

RESULTS_PAGE, README = ROOT / "docs" / "results.md", ROOT / "README.md"
BEGIN, END = "<!-- study: written by benchmarks/study/study_page.py -->", "<!-- end of study -->"
FIT = {0: (18.129, -0.0953), 1: (18.363, -0.0961), 2: (18.768, -0.0969), 4: (19.762, -0.0992), 8: (21.051, -0.1018)}
"""(A, alpha) of the fits A N^alpha of arXiv 2503.09799 to the losses of DiLoCo with so many replicas; 0: data parallel."""
PARAMETERS = 320_000
NO_MESSAGE = 1e-6
"""Time of a message, in steps, that is short enough not to count."""


def summary_rows(done: Records) -> list[Row]:
    """Return the rows of the table in docs/results.md: complete cells of the first three stages, and of those with the rule's outer
    step, by inner optimizer, the lowest loss first. Speeds are given where it is known with which share of the tokens synchronous
    training reaches the loss."""
    cells = [*STAGES["main"], *STAGES["gradients"], *STAGES["together"]]
    cells += [cell for cell in STAGES["auto"] if (cell.replicas, cell.batch) == (4, BATCH[4])]
    cells = [cell for cell in cells if mean_loss(cell, done) is not None]
    cells.sort(key=lambda cell: (synchronous_beside(cell).inner, mean_loss(cell, done)))
    timed = timed_cells(done)
    rows = []
    for cell in cells:
        loss, spread, gap, tokens, *_ = figures_of(cell, done)
        messages = MESSAGES if cell in timed else ()
        share = share_of_bytes(cell, done)
        of_bytes = "" if share is None else f"{share:.3f}"
        rows.append(
            (
                label_with_rounds(cell),
                f"{loss} ± {spread}",
                gap,
                tokens,
                "1" if cell == synchronous_beside(cell) else of_bytes,
                " / ".join(f"{token_speed(cell, done, steps):.2g}" for steps in messages),
                " / ".join(f"{speed_to_loss(cell, done, steps):.2g}" for steps in messages),
            )
        )
    return rows


def readme_rows(done: Records) -> list[Row]:
    """Return the rows of the table in README.md: one replica alone, and the cells of `README_ROWS` whose times are known, in that
    order."""
    cells = {label_with_rounds(cell): cell for cell in timed_cells(done)}
    networks = MESSAGES[1:]
    alone = (ALONE, "+0.0 %", "100 %", "0 %", *(speed_text(speed_alone(done, steps)) for steps in networks))
    rows = [alone] if cells else []
    for label, name in README_ROWS.items():
        if (cell := cells.get(label)) is not None:
            gap, tokens, *_ = figures_of(cell, done)[2:]
            columns = gap, tokens.partition(" %")[0] + "%", f"{share_of_bytes(cell, done):.1%}"
            speeds = (speed_text(speed_to_loss(cell, done, steps)) for steps in networks)
            rows.append((name, *(column.replace("%", " %") for column in columns), *speeds))
    return rows


def speed_text(speed: float) -> str:
    """Return a speedup with two digits."""
    return f"{speed:#.2g}".rstrip(".")


def speed_alone(done: Records, message_steps: float) -> float:
    """Return how many times as fast as synchronous training with four replicas one replica alone trains with the same batches: it
    computes the parts of all replicas one after another, and sends nothing."""
    together = STAGES["main"][0]
    computing = time_of(together, done, NO_MESSAGE).run
    return time_of(together, done, message_steps).run / (together.replicas * computing)


def share_of_bytes(cell: Cell, done: Records) -> float | None:
    """Return the bytes that a cell's final runs send, divided by those of synchronous training, or None if the latter is not done."""
    beside = synchronous_beside(cell)
    return mean_of(cell, "bytes", done) / mean_of(beside, "bytes", done) if mean_loss(beside, done) else None


def speed_to_loss(cell: Cell, done: Records, message_steps: float) -> float:
    """Return how many times as fast as synchronous training a cell of `timed_cells` reaches its own final loss, if a message of the
    model in fp32 takes `message_steps` steps."""
    return equal_loss_share(mean_loss(cell, done), cell, done) * step_speed(cell, done, message_steps)


def published_gap(replicas: int, parameters: float = PARAMETERS) -> str:
    """Return the published fit's distance of DiLoCo to data parallel training, by default extrapolated to the study's size."""
    fit, base = (scale * parameters**power for scale, power in (FIT[replicas], FIT[0]))
    return f"{fit / base - 1:+.1%}"


def change_rows(done: Records) -> list[Row]:
    """Return the complete cells of DiLoCo in all stages, beside synchronous training."""
    rows = []
    for cell in (cell for stage in STAGES.values() for cell in stage if cell.method == "diloco"):
        loss, spread, gap, _, _, rounds, _ = figures_of(cell, done)
        if gap:
            start = f", first {cell.together:.0%} synchronous" if cell.together else ""
            auto = ", `sync.outer=auto`" if cell.variant else ""
            what = f"{cell.replicas} replica{'s' * (cell.replicas > 1)}, H = {cell.every}{start}{TEXT_NAMES[cell.text]}{auto}"
            tokens = f"{mean_of(cell, 'tokens', done) / 1e6:.2f} M"
            beside = f"{mean_loss(synchronous_beside(cell), done):.4f}"
            # The fit is of runs with the best batch and a compute-optimal number of tokens.
            is_fitted = cell in (*STAGES["replicas"], *STAGES["main"])
            fit = published_gap(cell.replicas) if is_fitted else ""
            rows.append((what, str(cell.batch), tokens, rounds, f"{loss} ± {spread}", beside, gap, fit))
    return rows


def with_tables(text: str, tables: str) -> str:
    """Return a page's text with `tables` between its two marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def results_tables(done: Records) -> str:
    """Return the tables of docs/results.md and the texts between them."""
    summary, reached = markdown(SUMMARY, summary_rows(done)), markdown(REACHED, reach_rows(done))
    return "\n\n".join((summary, REACHED_TEXT, reached, CHANGES_TEXT, markdown(CHANGES, change_rows(done))))


def tables_of_pages(done: Records) -> dict[Path, str]:
    """Return the text between the marks of each page."""
    return {RESULTS_PAGE: results_tables(done), README: markdown(README_COLUMNS, readme_rows(done))}


def write_summaries(done: Records) -> None:
    """Write the tables of the records into docs/results.md and README.md."""
    for page, tables in tables_of_pages(done).items():
        page.write_text(with_tables(page.read_text(), tables))
