"""report.md, report.html (one file) and plots/*.png of a comparison."""

from __future__ import annotations

import base64
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

import llmtrain
from llmtrain.compare import formatting, plots, tables
from llmtrain.compare.aggregate import Results, TrialKey, gather
from llmtrain.compare.page import Heading, Lines, Page, PageSection, Picture, Pictures, Points, Text, markdown
from llmtrain.compare.results import DONE, Trial
from llmtrain.compare.sweep_axis import find_sweeps
from llmtrain.compare.timeline import draw_timelines
from llmtrain.compare.verdict import verdict

REPOSITORY = Path(llmtrain.__file__).resolve().parents[1]
DPI = 150

TABLE_NOTES = (
    "Medians over the seeds that are done, beside them the lowest and the highest seed where they differ; one seed has no "
    "spread. Losses are validation losses in nats per token, of the replicas' mean. Time is training time: start-up, "
    "validation and checkpoints are not in it. Bytes are those sent between replicas, all ranks together. What was spent to "
    "a loss is interpolated between the two validations around it. Speed-up: the baseline's time to the target / the run's; its "
    "range is from the ends of both ranges, and where 1 lies in it they overlap and no difference was seen; it is mixed where a run "
    "is sooner in fewer of its seeds than the baseline, or later in more. Speed-up to its "
    "own final loss is the same, to the loss that the run itself ended with, also where that is above the target: the baseline was "
    "then in the middle of its learning-rate schedule, which flatters the run. A trial that was stopped counts in "
    "tokens/s and in what it reached, a failed one in nothing."
)
PLOT_NOTES = (
    "One color a run, in all pictures. With several seeds each is a thin line and their median the thick one; a cross is "
    "where a failed or stopped run ended. Axes of time are logarithmic where runs differ by more than "
    f"{plots.LARGE_RATIO:.0f} times, axes of bytes always."
)
TIME_NOTES = (
    "Medians over seeds of the means over ranks; idle is what was not computing. Computing is all time in which training "
    "went on, reading data and injected delays included, so communication that was hidden behind it has no bar of its own. "
    "Waiting is for the slowest replica: at the start of synchronizations, and at log lines, which let no replica run further "
    "ahead than two of them."
)
TIMELINE_NOTES = (
    "One row a rank, the same number of seconds for all runs under a condition; black ticks are the starts of steps, thin "
    "bars below a row messages under way in the background. Of each run the first traced seed. Clocks are the hosts' own."
)
WIRE_NOTES = (
    "Sums over all hosts for the whole of a trial, medians over seeds. Interfaces count whole frames: beside the counted bytes "
    "they hold the headers of Ethernet, IP and TCP (66 bytes a frame: 4 to 5 % where frames carry 1448 bytes, less where an "
    "interface hands on larger ones), acknowledgements, repeated segments, and what a run does not count: the start (nodes and "
    "ranks meet, 0.5 MB a host) and what goes over torch's own groups around checkpoints."
)


def write_report(
    trials: Sequence[Trial],
    folder: Path,
    baseline: str | None = None,
    target: float | None = None,
    planned: Sequence[TrialKey] = (),
    command: str | None = None,
) -> Path:
    """Write report.md, report.html and plots/ into `folder`, in the place of older ones. Returns report.html's path.

    `baseline` names a run (without it, the synchronous one, else the first), `target` is a validation loss in nats per
    token (without it, the baseline's final one under the same condition). `planned` says which trials there are to be, and
    the order of conditions and runs; those without a trial yet are shown as not yet run. `command` is what made the trials.
    Raises ResultsError for a baseline that does not exist.
    """
    results = gather(trials, baseline, target, planned)
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    said = verdict(results)
    sections = (
        _table_section(results),
        _plot_section(results, folder),
        _time_section(results, folder),
        _timeline_section(results, folder),
        _wire_section(results),
        _failures_section(results),
        _making_section(results, folder, command),
    )
    title = f"Comparison {folder.resolve().name}"
    page = Page(title, said.sentence, said.details, tuple(section for section in sections if section.blocks))
    _replace(folder / "report.md", markdown(page))
    target_path = folder / "report.html"
    _replace(target_path, html(page, folder))
    return target_path


def html(page: Page, folder: Path) -> str:
    """The page as one file: its pictures, paths relative to `folder`, are inside."""

    def data_uri(picture: Picture) -> str:
        return f"data:image/png;base64,{base64.b64encode((folder / picture.path).read_bytes()).decode()}"

    environment = Environment(
        loader=PackageLoader("llmtrain.compare", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(data_uri=data_uri, inline=_inline, number=_number)
    return environment.get_template("report.html.j2").render(page=page)


def _inline(text: str) -> Markup:
    """With `code`."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _number(cell: str) -> Markup:
    """A median over its range."""
    main, bracket, rest = cell.partition(" (")
    if not bracket:
        return Markup('<span class="main">{}</span>').format(cell)
    return Markup('<span class="main">{}</span><span class="range">{}</span>').format(main, rest.replace(")", ""))


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def _table_section(results: Results) -> PageSection:
    section = PageSection("Runs")
    for condition in results.conditions:
        section.blocks.append(Heading(condition.name))
        if condition.in_words:
            section.blocks.append(Text(f"{condition.in_words}."))
        section.blocks.append(tables.runs_table(condition))
    section.blocks.append(Text(TABLE_NOTES))
    return section


def _plot_section(results: Results, folder: Path) -> PageSection:
    section = PageSection("Loss against tokens, time and bytes")
    styles = plots.styles(results)
    drawn = [
        (
            plots.draw_throughput(results, scale, styles),
            f"throughput-{formatting.file_name(scale.label)}",
            f"Tokens per second: {scale.label}",
        )
        for scale in find_sweeps([condition.name for condition in results.conditions])
    ]
    section.blocks += _pictures(folder, drawn)
    for condition in results.conditions:
        drawn = [
            (
                plots.draw_loss(condition, axis, styles),
                f"loss_{axis.name}-{formatting.file_name(condition.name)}",
                f"{condition.name}: validation loss against {axis.label}",
            )
            for axis in plots.AXES
        ]
        section.blocks += _pictures(folder, drawn)
    if section.blocks:
        section.blocks.append(Text(PLOT_NOTES))
    return section


def _time_section(results: Results, folder: Path) -> PageSection:
    drawn = [
        (
            plots.draw_time(condition),
            f"time-{formatting.file_name(condition.name)}",
            f"{condition.name}: where the training time went",
        )
        for condition in results.conditions
    ]
    blocks = _pictures(folder, drawn)
    return PageSection("Where the time went", [*blocks, Text(TIME_NOTES)] if blocks else [])


def _timeline_section(results: Results, folder: Path) -> PageSection:
    drawn = [
        (
            draw_timelines(condition),
            f"timeline-{formatting.file_name(condition.name)}",
            f"{condition.name}: what each rank did in a few rounds",
        )
        for condition in results.conditions
    ]
    blocks = _pictures(folder, drawn, wide=True)
    return PageSection("Timelines", [*blocks, Text(TIMELINE_NOTES)] if blocks else [])


def _pictures(folder: Path, drawn: Sequence[tuple[Figure | None, str, str]], wide: bool = False) -> list[Pictures]:
    """Save figures; none where there are none."""
    saved = []
    for figure, name, caption in drawn:
        if figure is not None:
            path = Path("plots") / f"{name}.png"
            figure.savefig(folder / path, dpi=DPI, metadata={"Software": None})
            saved.append(Picture(path, caption))
    return [Pictures(tuple(saved), wide)] if saved else []


def _wire_section(results: Results) -> PageSection:
    table = tables.wire_table(results)
    return PageSection("Bytes against interface counters", [table, Text(WIRE_NOTES)] if table else [])


def _failures_section(results: Results) -> PageSection:
    section = PageSection("Trials that did not finish")
    for trial in results.trials:
        if trial.state == DONE:
            continue
        codes = ", ".join("none" if code is None else str(code) for code in trial.exit_codes)
        ended = f"{trial.state}, exit codes of the hosts: {codes}" if codes else trial.state
        at = (
            f"; its last line of metrics is of step {trial.lines[-1]['step']:g}"
            if trial.lines
            else "; it trained no step"
        )
        section.blocks += [Heading(trial.name), Text(f"{ended[0].upper()}{ended[1:]}{at}.")]
        if trial.last_lines:
            section.blocks.append(Lines(tuple(map(_portable, trial.last_lines))))
    return section


def _making_section(results: Results, folder: Path, command: str | None) -> PageSection:
    section = PageSection("How it was made")
    said = [f"Command: `{_portable(command)}`"] if command else []
    if (folder / "comparison.yaml").exists():
        said.append("Everything that was asked for, defaults included: `comparison.yaml` beside this report")
    said += [
        f"Baseline: {results.baseline}. Target: {_target(results)}.",
        *_provenance("Commit", (trial.commit for trial in results.trials)),
        *_provenance("Machine", (trial.machine for trial in results.trials)),
        *_wall_time(results.trials),
    ]
    said += [f"{condition.name}: {condition.in_words}" for condition in results.conditions if condition.in_words]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said.append(
        f"This report was written by llmtrain {llmtrain.__version__} with Python {platform.python_version()} on a machine "
        f"with {cores} cores ({platform.system()} {platform.machine()})"
    )
    section.blocks += [Points(tuple(said)), tables.recipes_table(results)]
    return section


def _target(results: Results) -> str:
    if results.given_target is not None:
        return f"a validation loss of {formatting.loss(results.given_target)}, as given"
    return "the baseline's final validation loss under the same condition (median over seeds)"


def _provenance(title: str, values: Iterator[str | None]) -> list[str]:
    """A point that lists different values; none where nobody told one."""
    told = list(dict.fromkeys(value for value in values if value))
    return [f"{title}: {', '.join(told)}"] if told else []


def _wall_time(trials: Sequence[Trial]) -> list[str]:
    told = [trial.wall_seconds for trial in trials if trial.wall_seconds is not None]
    return (
        [f"{len(told)} trials took {formatting.seconds(sum(told))} in all, with start-up and validation"]
        if told
        else []
    )


def _portable(line: str) -> str:
    """Without the folder that this repository happens to be in."""
    return line.replace(f"{REPOSITORY}/", "")
