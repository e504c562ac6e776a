"""Rewrite the committed reports of comparisons from their trials, after a change of reports or of their statistics.

    python benchmarks/compare_reports.py                # benchmarks/results/compare/*
    python benchmarks/compare_reports.py bandwidth      # only this one

The trials are unpacked from trials.tar.xz. Baseline, target and the order of runs come from comparison.yaml; a folder at_LOSS has the
report for that target. The archives have no traces, so the section with timelines stays, and so does the line with the command
of the trials. A picture is replaced only if pixels differ.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
from PIL import Image
from table import RESULTS

from llmtrain.compare.comparison import COMPARISON, load_comparison
from llmtrain.compare.measures import gather
from llmtrain.compare.report import write_report
from llmtrain.compare.results import load_trials

TIMELINES = re.compile(r"## Timelines\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
MADE = "## How this report was made\n\n"
AFTER = re.compile("^(## (?:Bytes|Trials|How))", re.MULTILINE)
COMMAND = re.compile("^- Command: .*\n", re.MULTILINE)


def rewrite(folder: Path, trials: Path, comparison_file: Path, target: float | None = None) -> None:
    """Rewrite report.md and plots/ in `folder` from the `trials` of a comparison."""
    comparison = load_comparison(comparison_file)
    keys = [
        (condition, run, seed)
        for condition in comparison.conditions
        for run in comparison.runs
        for seed in comparison.seeds
    ]
    results = gather(load_trials([trials]), comparison.baseline, target or comparison.target.loss, keys)
    old = (folder / "report.md").read_text()
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / old.partition("\n")[0].removeprefix("# Comparison ")  # the name is the report's title
        made.mkdir()
        if (folder / COMPARISON).exists():
            shutil.copy(folder / COMPARISON, made)
        write_report(results, made)
        timelines, command = ("".join(kept.findall(old)) for kept in (TIMELINES, COMMAND))
        head, heading, tail = AFTER.split((made / "report.md").read_text(), maxsplit=1)
        (folder / "report.md").write_text(f"{head}{timelines}{heading}{tail}".replace(MADE, MADE + command))
        for picture in (made / "plots").iterdir():
            if not _is_same(picture, folder / "plots" / picture.name):
                shutil.copy(picture, folder / "plots")
                print(f"{folder}: new {picture.name}")


def _is_same(one: Path, other: Path) -> bool:
    return other.exists() and np.array_equal(*(np.asarray(Image.open(path).convert("RGB")) for path in (one, other)))


def main() -> None:
    """Rewrite the reports named on the command line, or all."""
    made = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument(
        "names", nargs="*", metavar="NAME", help="folder below benchmarks/results/compare; all by default"
    )
    archives = {path.parent.name: path for path in sorted((RESULTS / "compare").glob("*/trials.tar.xz"))}
    names = made.parse_args().names or list(archives)
    if unknown := [name for name in names if name not in archives]:
        raise SystemExit(f"{', '.join(unknown)}: no trials.tar.xz there; choose from {', '.join(archives)}")
    for name in names:
        folder, archive = archives[name].parent, archives[name]
        with tempfile.TemporaryDirectory() as trials:
            with tarfile.open(archive) as packed:
                packed.extractall(trials, filter="data")
            rewrite(folder, Path(trials), folder / COMPARISON)
            for other in folder.glob("at_*"):
                rewrite(other, Path(trials), folder / COMPARISON, float(other.name.removeprefix("at_")))


if __name__ == "__main__":
    main()
