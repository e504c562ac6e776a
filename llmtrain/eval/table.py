"""Comparison of results: a terminal table with a column per run and a row per score, and curves over training."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from llmtrain.errors import UserError
from llmtrain.eval.evaluated_checkpoint import Checkpoint
from llmtrain.eval.scores import ACCURACIES, SEPARATE, Entry, PairedTest, compare, compare_with_chance
from llmtrain.quantities import format_si
from llmtrain.run_plots import plain_label

NOTES = {
    "near chance": "near chance: within 2 standard errors of what guessing gives; such a score says nothing about the model",
    "below chance": "below chance: more than 2 standard errors below what guessing gives",
}

Point = tuple[float, float, float]
"""(tokens or steps, value, standard error); the standard error is 0 if unknown."""


@dataclass(frozen=True)
class Evaluated:
    """Checkpoint with its results, by the name of the evaluation unit."""

    checkpoint: Checkpoint
    entries: Mapping[str, Entry]


@dataclass(frozen=True)
class Row:
    """Row of the table: one metric of one task, group or text file."""

    unit: str
    name: str
    metric: str


def rows_of(evaluated: Sequence[Evaluated], show: Mapping[str, Sequence[str]]) -> list[Row]:
    """Return the rows of the table in the suite's order, without metrics that a task does not have."""
    rows = []
    for unit, metrics in show.items():
        entry = evaluated[0].entries[unit]
        rows += [Row(unit, name, m) for name in entry.shown for m in metrics if m in entry.scores[name]]
    return rows


def without_rows(each: Evaluated, show: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the units that have none of the metrics that the suite shows for them, with the metrics that they have."""
    with_rows = {row.unit for row in rows_of([each], show)}
    units = [unit for unit, metrics in show.items() if metrics and unit not in with_rows]
    found = {unit: {metric for scores in each.entries[unit].scores.values() for metric in scores} for unit in units}
    return {
        unit: ", ".join(sorted(metric for metric in metrics if metric != "n" and not metric.endswith("_stderr")))
        for unit, metrics in found.items()
    }


def comparison(ours: Evaluated, theirs: Evaluated, row: Row) -> PairedTest | None:
    """Return the paired test of two checkpoints on one score, or None if the score cannot be tested."""
    a, b = ours.entries[row.unit], theirs.entries[row.unit]
    if row.name not in a.about or row.name not in b.about or _context(a, row) != _context(b, row):
        return None
    sides = [[entry.answers[task] for task in entry.about[row.name]["members"]] for entry in (a, b)]
    found = compare(*sides, row.metric)
    ours_is, theirs_is = a.scores[row.name].get(row.metric), b.scores[row.name].get(row.metric)
    if found is None or ours_is is None or theirs_is is None:
        return found
    return replace(found, difference=ours_is - theirs_is)  # a group's score may weight its tasks equally


def _context(entry: Entry, row: Row) -> tuple[bool, int | None]:
    """Return (whether the model has read the documents one at a time, tokens per window of a text). Scores with different contexts are
    not comparable."""
    about = entry.about.get(row.name, {})
    return SEPARATE in about, about.get("window")


def verdict_of(entry: Entry, row: Row) -> str:
    """Return the verdict on one score: near chance, below chance, or an empty string."""
    scores, chance = entry.scores[row.name], entry.about[row.name].get("chance")
    value = scores.get(row.metric)
    if chance is None or value is None or row.metric not in ACCURACIES:
        return ""
    return compare_with_chance(value, scores.get(f"{row.metric}_stderr") or 0.0, chance, int(scores["n"] or 1))


def cell(entry: Entry, row: Row) -> str:
    """Format one score for the table, such as `0.2531 ± 0.0089 near chance`."""
    scores = entry.scores.get(row.name, {})
    value, error = scores.get(row.metric), scores.get(f"{row.metric}_stderr")
    if value is None:
        return "–"
    digits = 4 if abs(value) < 100 else 1
    text = f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
    called = verdict_of(entry, row)
    return f"{text} [yellow]{called}[/yellow]" if called else text


def scores_on_one_line(each: Evaluated, show: Mapping[str, Sequence[str]]) -> str:
    """Format the first score of each task on one line: `arc_easy acc_norm 0.253 ± 0.009 near chance, ...`."""
    first = {(row.unit, row.name): row for row in reversed(rows_of([each], show))}
    parts = []
    for (unit, name), row in reversed(first.items()):
        scores = each.entries[unit].scores[name]
        value, error = scores[row.metric], scores.get(f"{row.metric}_stderr")
        if value is not None:
            text = f"{name} {row.metric} {value:.3f}" + ("" if error is None else f" ± {error:.3f}")
            parts.append(f"{text} {verdict_of(each.entries[unit], row)}".rstrip())
    return ", ".join(parts)


def table_of(
    title: str,
    evaluated: Sequence[Evaluated],
    show: Mapping[str, Sequence[str]],
    baseline: Evaluated | None,
    limited_to_one: Collection[str] = (),
) -> tuple[Table, list[str]]:
    """Return the table and the notes to print below it. Of the units `limited_to_one`, only one document was read."""
    table = Table(title=title, title_justify="left")
    table.add_column("task")
    table.add_column("metric")
    table.add_column("documents", justify="right")
    for each in evaluated:
        table.add_column(_heading(each, baseline))
    notes, tests = [], []
    for row in (rows := rows_of(evaluated, show)):
        cells = []
        for each in evaluated:
            entry = each.entries[row.unit]
            text = cell(entry, row)
            compared = comparison(each, baseline, row) if baseline and each is not baseline else None
            if compared:
                text += f"\n[dim]{compared.difference:+.4f}, p = {compared.p:.2g}[/dim]"
                tests.append(compared.test)
            called = verdict_of(entry, row) if row.name in entry.scores else ""
            notes += [NOTES[called]] if called else []
            cells.append(text)
        scores = evaluated[0].entries[row.unit].scores[row.name]
        documents = scores["n"]
        if documents == 1 and "bytes" in scores and row.unit not in limited_to_one:  # a text
            notes.append(
                f"{row.name}: read as one document, so it has no standard error, and a test says nothing; cut it with `separator:` in the "
                'suite ("\\n\\n": a document per paragraph)'
            )
        table.add_row(row.name, row.metric, f"{documents:,}", *cells)
    everything = [*evaluated, baseline] if baseline else evaluated
    apart = [one.checkpoint.label for one in everything if any(_context(one.entries[row.unit], row)[0] for row in rows)]
    for row in rows:
        windows = [_context(one.entries[row.unit], row)[1] for one in everything]
        if len(set(windows)) > 1:
            each = ", ".join(
                f"{window} ({one.checkpoint.label})" for one, window in zip(everything, windows, strict=True)
            )
            notes.append(
                f"{row.name}: read in windows of {each} tokens; losses in other windows are not comparable, and not tested; "
                "give `window:` in the suite"
            )
    if apart:
        notes.append(
            f"{', '.join(dict.fromkeys(apart))}: trained on separate documents, so texts are read one document at a time; such losses are "
            "comparable, and tested, among such models only"
        )
    if tests:
        notes.append(
            f"p: two-sided, against {baseline.checkpoint.label}, paired by document ({', '.join(dict.fromkeys(tests))}); "
            "not corrected for the number of comparisons"
        )
    return table, list(dict.fromkeys(notes))


def _heading(each: Evaluated, baseline: Evaluated | None) -> str:
    checkpoint = each.checkpoint
    lines = [checkpoint.label + (" (baseline)" if each is baseline else "")]
    if checkpoint.step is not None:
        tokens = "" if checkpoint.tokens is None else f", {format_si(checkpoint.tokens)} tokens"
        lines.append(f"step {checkpoint.step}{tokens}")
    return "\n".join(lines)


def lines_of(evaluated: Sequence[Evaluated], row: Row, over_tokens: bool) -> dict[str, list[Point]]:
    """Return {run: points} for one score, in order of training."""
    lines: dict[str, list[Point]] = {}
    for each in evaluated:
        checkpoint, scores = each.checkpoint, each.entries[row.unit].scores.get(row.name, {})
        place = checkpoint.tokens if over_tokens else checkpoint.step
        value = scores.get(row.metric)
        if value is not None and place is not None:
            error = scores.get(f"{row.metric}_stderr") or 0.0
            lines.setdefault(checkpoint.label, []).append((place, value, error))
    return {label: sorted(points) for label, points in lines.items()}


def draw_curves(evaluated: Sequence[Evaluated], show: Mapping[str, Sequence[str]], title: str, target: Path) -> None:
    """Plot the scores with error bars of one standard error, and save the figure as a PNG.

    The x axis shows training tokens, or steps if the tokens of any checkpoint are unknown. A dashed line marks the
    chance level of accuracies. Raises UserError if the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    rows = rows_of(evaluated, show)
    over_tokens = all(each.checkpoint.tokens is not None for each in evaluated)
    columns = min(3, len(rows))
    height = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * height), layout="constrained")
    figure.suptitle(plain_label(title))
    panels = figure.subplots(height, columns, squeeze=False).flat
    for panel in list(panels)[len(rows) :]:
        panel.set_visible(False)
    for row, panel in zip(rows, figure.axes, strict=False):
        for label, points in lines_of(evaluated, row, over_tokens).items():
            places, values, errors = zip(*points, strict=True)
            panel.errorbar(places, values, errors, marker="o", markersize=4, capsize=2, label=plain_label(label))
        chance = evaluated[0].entries[row.unit].about[row.name].get("chance")
        if chance is not None and row.metric.startswith("acc"):
            panel.axhline(chance, linestyle="--", color="grey", label="chance")
        panel.set(
            title=plain_label(row.name),
            ylabel=plain_label(row.metric),
            xlabel="training tokens" if over_tokens else "steps",
        )
        panel.xaxis.set_major_formatter(EngFormatter(sep=""))
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=130)
    except OSError as error:
        raise UserError(f"{target} can't be written ({error.strerror}); choose another folder with --out") from None
