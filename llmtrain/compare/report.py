"""Report of a comparison: its headline and tables as text, and the files report.md, report.html and plots/*.png."""

from __future__ import annotations

import base64
import math
import platform
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import llmtrain
from llmtrain.compare import plots
from llmtrain.compare.benchmarks import benchmark_tables
from llmtrain.compare.comparison import COMPARISON
from llmtrain.compare.measures import Outcome, Results, find_sweeps, log_interval
from llmtrain.compare.results import AS_RUN, Trial, TrialState
from llmtrain.files import atomic_write
from llmtrain.process_limits import usable_cores

REPOSITORY = Path(llmtrain.__file__).resolve().parents[1]
DPI = 150
NOTHING = "–"


def write_report(results: Results, folder: Path, command: str | None = None) -> Path:
    """Write report.md, report.html and plots/ into `folder`, replacing older ones. Return report.html's path.

    `command` is the command that made the trials.
    """
    (folder / "plots").mkdir(parents=True, exist_ok=True)
    title, trials = f"Comparison {folder.resolve().name}", list(results.trials["trial"].dropna())
    loader = PackageLoader("llmtrain.compare", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"literal": literal, "loss": loss, "duration": seconds, "percent": percent}
    environment.filters["portable"] = lambda line: line.replace(f"{REPOSITORY}/", "")
    text = environment.get_template("report.md.j2").render(
        title=title,
        results=results,
        trials=trials,
        commits=_commits(trials),
        headline=headline(results),
        runs={name: runs_table(results, name) for name in results.targets},
        benchmarks=list(benchmark_tables(results)),
        wire=wire_table(results),
        recipes=recipes_table(results),
        sweeps=find_sweeps(list(results.targets)),
        plots=plots,
        image=partial(_image, folder),
        words={trial.condition: trial.condition_in_words for trial in trials if trial.condition_in_words},
        command=command,
        has_file=(folder / COMPARISON).exists(),
        program=f"llmtrain {llmtrain.__version__} with Python {platform.python_version()}",
        cores=usable_cores(),
        system=f"{platform.system()} {platform.machine()}",
    )
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    html = environment.get_template("report.html.j2").render(title=title, body=html_body(text, folder))
    atomic_write(folder / "report.md", text)
    atomic_write(folder / "report.html", html)
    return folder / "report.html"


def _commits(trials: Sequence[Trial]) -> list[str]:
    """Return the commits of the trials' code. If there are several, each is followed by the seeds of its trials."""
    seeds: dict[str, set[int]] = {}
    for trial in trials:
        if trial.commit is not None:
            seeds.setdefault(trial.commit, set()).add(trial.seed)
    if len(seeds) < 2:
        return list(seeds)
    return [
        f"{commit} (seed{'s' * (len(own) > 1)} {', '.join(map(str, sorted(own)))})" for commit, own in seeds.items()
    ]


def html_body(markdown: str, folder: Path) -> str:
    """Return a report in HTML with scrolling tables and embedded pictures, whose paths are relative to `folder`."""

    def figure(found: re.Match[str]) -> str:
        path, kind, caption = found.groups()
        content = base64.b64encode((folder / path).read_bytes()).decode()
        image = f'<img src="data:image/png;base64,{content}" alt="{caption}">'
        return f'<figure class="{kind}"><div class="scroll">{image}</div><figcaption>{caption}</figcaption></figure>'

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    median_over_range = r'\1<span class="main">\2</span><span class="range">\3</span>'  # the range may be empty
    html = re.sub(r'(<td style="text-align:right">)(.*?)(?: \((.*)\))?(?=</td>)', median_over_range, html)
    html = re.sub(r"<p>(<img .*?)</p>", r'<div class="pictures">\1</div>', html, flags=re.DOTALL)
    return re.sub(r'<img src="(plots/(\w+).*?)" alt="(.*?)" />', figure, html)


def _image(folder: Path, figure: Figure | None, name: str, caption: str) -> str:
    """Write a figure to plots/ in `folder` and return its Markdown, or nothing for None."""
    if figure is None:
        return ""
    path = f"plots/{re.sub(r'[^A-Za-z0-9._-]+', '_', name).strip('_.')}.png"
    figure.savefig(folder / path, dpi=DPI, metadata={"Software": None})
    return f"![{literal(caption)}]({path})\n"


def headline(results: Results) -> str:
    """Return the largest speed-up as a sentence. No run is called faster unless its outcome says so. A speed-up of a single seed is
    only named if no run is faster with two or more."""
    runs, baseline = results.runs, results.baseline
    if any(trial.has_no_times for trial in results.trials["trial"].dropna()):
        return "Replicas that take turns in one process have no times to compare: see losses, tokens and bytes"
    faster = runs["speed_up"][runs["outcome"] == Outcome.FASTER]
    ranked = faster.assign(has_interval=faster["finite"] > 1)
    ranked = ranked.sort_values(["has_interval", "median"], ascending=False, kind="stable")
    if ranked.empty:
        silent = [Outcome.BASELINE, Outcome.NOT_FINISHED, Outcome.NOT_COMPARABLE]
        if runs["outcome"].isin(silent).all():
            reason = f"in no seed did both the baseline {baseline} and another run reach the target"
            return f"Nothing to compare: {reason if results.unit.is_ranked else results.unit.note}"
        return f"No run was significantly faster than the baseline {baseline}"
    condition, name = ranked.index[0]
    speed_up = ranked.iloc[0]
    between = f"{ratio(speed_up['low'])} to {ratio(speed_up['high'])}, " if speed_up["finite"] > 1 else ""
    seeds = _in_seeds(speed_up) + (": chance is not excluded" if speed_up["finite"] == 1 else "")
    for run in (name, baseline):
        side = runs.loc[(condition, run), "seconds"]
        if side["finite"] < side["seeds"]:
            seeds += f"; {run}: {side['finite']:.0f} of {side['seeds']:.0f} reached it"
        if failed := runs.loc[(condition, run), ("failed", "")]:
            seeds += f"; {run}: {failed} failed"
    goal = f"{baseline}'s final loss" if results.given_target is None else "a validation loss of"
    rivals = _rivals(results, condition, name, [run for other, run in ranked.index[1:] if other == condition])
    tied = f"; not significantly faster than {', '.join(rivals)}" if rivals else ""
    times = f"{ratio(speed_up['median'])} times as fast as {baseline}"
    return f"Fastest to {goal} {loss(results.targets[condition])}: {name}{_under(condition)}, {times} ({between}{seeds}){tied}"


def _rivals(results: Results, condition: str, best: str, others: Sequence[str]) -> list[str]:
    """Return the other runs that were not slower than `best` by the rule of outcomes, or share no seed with it in which both reached
    the target."""
    trials = results.trials[results.trials["condition"] == condition]
    times = trials.pivot(index="seed", columns="run", values="seconds").replace([0, math.inf], math.nan)
    return [run for run in others if not log_interval(times[run] / times[best])[0] > 0]


def _under(condition: str) -> str:
    return f" under {condition}" if condition != AS_RUN else ""


def runs_table(results: Results, condition: str) -> pd.DataFrame:
    """Return one row per run with its outcome and its costs."""
    runs = results.runs.loc[condition]
    by_run = results.trials[results.trials["condition"] == condition].groupby("run", sort=False)["state"]
    unfinished = by_run.agg(
        lambda states: f"{Outcome.NOT_FINISHED} {(states != TrialState.DONE).sum()} of {len(states)}"
    )
    by_one_seed = runs["outcome"].isin([Outcome.FASTER, Outcome.SLOWER]) & (runs["speed_up"]["finite"] == 1)
    outcome = runs["outcome"].mask(by_one_seed, runs["outcome"] + " (1 seed)")
    target = results.targets[condition]
    to = "to the target" if math.isnan(target) else f"to loss {loss(target)}"
    columns = {
        "trials": by_run.agg(lambda states: ", ".join(f"{n} {state}" for state, n in Counter(sorted(states)).items())),
        "outcome": outcome.where(outcome != Outcome.NOT_FINISHED, unfinished),
        "final loss": _cells(runs["final_loss"], loss),
        f"time {to}": _cells(runs["seconds"], seconds),
        "speed-up": _ratio_cells(runs["speed_up"], ratio),
        "speed-up to its own final loss": _ratio_cells(runs["own_speed_up"], ratio),
        "tokens/s": _cells(runs["tokens_per_second"], count),
        "sent in total": _cells(runs["bytes_sent"], size),
        f"sent {to}": _cells(runs["bytes"], size),
        "of the baseline's bytes": _ratio_cells(runs["byte_share"], percent),
        f"tokens {to}": _cells(runs["tokens"], count),
        "training time": _cells(runs["training_seconds"], seconds),
    }
    return pd.DataFrame(columns, runs.index).rename(index=literal).reset_index()


def wire_table(results: Results) -> pd.DataFrame:
    """Return one row per condition and run with interface counters: the medians of these counters and of the counted bytes."""
    runs = results.runs[results.runs["wire_sent"]["seeds"] > 0]
    titles = {
        "wire_counted": "counted: method",
        "wire_others": "counted: validation, metrics",
        "wire_sent": "sent by interfaces",
        "wire_received": "received by interfaces",
    }
    medians = runs.xs("median", axis=1, level=1)[list(titles)].rename(columns=titles)
    table = medians.map(lambda median: NOTHING if math.isnan(median) else size(median))
    table.insert(0, "trials", runs["wire_sent"]["seeds"].astype(int))
    table["sent / counted"] = _cells(runs["wire_ratio"], loss)
    return table.rename(index=literal).reset_index()


def recipes_table(results: Results) -> pd.DataFrame:
    """Return the recipe, overrides and seeds of each run. Overrides of `run`, such as names and folders, are left out."""
    makings = []
    for trial in results.trials["trial"].dropna():
        recipe = f"`{trial.recipe}`" if trial.recipe else "`recipe.yaml` in its folder"
        overrides = " ".join(f"`{one}`" for one in trial.overrides if not one.startswith("run.")) or NOTHING
        overrides = ", ".join((overrides, *trial.stages))
        makings.append((literal(trial.run), trial.method, literal(trial.condition), trial.seed, recipe, overrides))
    table = pd.DataFrame(makings, columns=["run", "method", "conditions", "seeds", "recipe", "overrides"])
    groups = table.groupby(["run", "recipe", "overrides"], sort=False)
    listed = groups.agg(lambda values: ", ".join(map(str, dict.fromkeys(values.dropna()))) or NOTHING)
    return listed.reset_index()[table.columns]


def _cells(spreads: pd.DataFrame, show: Callable[[float], str]) -> list[str]:
    return [spread_cell(spread, show) for spread in spreads.to_dict("records")]


def spread_cell(spread: dict[str, float], show: Callable[[float], str]) -> str:
    """Return the median, and the range if its ends look different. If some seeds did not reach the loss, add how many did."""
    if not spread["seeds"] > 0:
        return NOTHING
    if not spread["finite"]:
        return "not reached"
    median = show(spread["median"]) if math.isfinite(spread["median"]) else "not reached"
    low, high = show(spread["low"]), show(spread["high"])
    if spread["finite"] < spread["seeds"]:
        return f"{median} ({low} to {high} in {spread['finite']:.0f} of {spread['seeds']:.0f})"
    return f"{median} ({low} to {high})" if low != high else median


def _ratio_cells(spreads: pd.DataFrame, show: Callable[[float], str]) -> list[str]:
    """Return the median of each ratio, its range if the ends look different, and the number of seeds that have a ratio."""
    cells = []
    for spread in spreads.to_dict("records"):
        median, low, high = (show(spread[name]) for name in ("median", "low", "high"))
        between = f"{low} to {high}, " if low != high else ""
        cells.append(f"{median} ({between}{_in_seeds(spread)})" if spread["finite"] else NOTHING)
    return cells


def _in_seeds(spread: dict[str, float]) -> str:
    """Return how many seeds have a ratio: "3 seeds", or "2 of 3 seeds" if the run's third seed has none."""
    finite, seeds = int(spread["finite"]), int(spread["seeds"])
    return f"{finite} of {seeds} seeds" if finite < seeds else f"{seeds} seed{'s' * (seeds > 1)}"


def literal(text: str) -> str:
    """Return Markdown that shows `text` as it is."""
    return re.sub(r"([\\*`<\[\]])", r"\\\1", text)


def seconds(value: float) -> str:
    """Format a duration: 4.23 -> "4.2 s", 41.2 -> "41 s", 130 -> "2.2 min", 8000 -> "2.2 h"."""
    if value < 119.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:.1f} h"


def size(value: float) -> str:
    """Format bytes: "3.24 GB"."""
    return EngFormatter("B")(float(f"{value:.3g}"))


def count(value: float) -> str:
    """Format tokens, or tokens per second: "1.23 M"."""
    return EngFormatter()(float(f"{value:.3g}"))


def loss(value: float) -> str:
    """Format a loss (nats per token or bits per byte) with three decimals."""
    return f"{value:.3f}"


def ratio(value: float) -> str:
    """Format a ratio, with fewer digits the larger it is: 0.97, 5.2, 41."""
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def percent(share: float) -> str:
    """Format a share with two digits: 0.0213 -> "2.1 %", 0.97 -> "97 %"."""
    return f"{float(f'{100 * share:.2g}'):g} %"
