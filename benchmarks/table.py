"""Shared parts of the benchmarks: a table for terminal and page, the command and versions that produced it, and small runs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "transformers")
COMMIT = "LLMTRAIN_COMMIT"
"""Environment variable: the commit, for a copy of the tree without `.git`."""
COMMITS, UNKNOWN = "benchmark_commits.txt", "unknown"
"""File in a run directory with the commits at which `train` has started the run, and the commit of a run without that file."""
COMMON = (
    "data.tokenizer=train:4096",
    "train.tokens=null",
    "train.steps=300",
    "train.sequence_length=128",
    "train.global_batch=32",
    "train.micro_batch=8",
    "schedule.warmup_steps=30",
    "parallel.precision=fp32",
    "parallel.replicas=4",
    "parallel.shards=1",
    "checkpoint.every=null",
    "log.every=10",
    "log.tensorboard=false",
    "eval.every=50",
    "eval.tokens=100_000",
    "eval.sample_prompt=null",
)
"""Overrides that shorten a recipe for GPUs to a few minutes on two cores."""
WARMUP, EVERY = 50, 20
"""Synchronous steps at the start, and local steps per round, for the methods that have them."""

Row = tuple[str, ...]


def parser(description: str) -> ArgumentParser:
    """Return a parser with the option `--write`, whose help shows `description`, a script's docstring, with its line breaks."""
    made = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    made.add_argument("--write", action="store_true", help="also write to benchmarks/results/")
    return made


def add_run_options(to: ArgumentParser) -> None:
    """Add the options that name the text of small runs, and further overrides for all of them."""
    to.add_argument("--source", help="data.source: a file or folder of text, TinyStories' train.txt for example")
    to.add_argument("--validation", help="data.validation: another one; without, held-out documents of --source")
    to.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="for all runs, laid over the rest")


def run_overrides(options: Namespace) -> list[str]:
    """Return the overrides that all runs of a benchmark have in common, those of the given text included."""
    data = [f"data.source={_relative(options.source)}"] if options.source else []
    if options.source or options.validation:
        data.append(f"data.validation={_relative(options.validation) if options.validation else 'null'}")
    return [*COMMON, *data]


def train(recipe: str, overrides: Sequence[str]) -> Path:
    """Train a recipe, unless its run is complete, after recording the commit in the run directory. Return that directory."""
    from llmtrain.recipe_loader import load_recipe
    from llmtrain.train.run_dir import RunDirectory

    loaded = load_recipe(ROOT / recipe, overrides)
    run = ROOT / loaded.run.out_dir / loaded.run.name
    with contextlib.chdir(ROOT):  # where runs start
        is_complete = RunDirectory(loaded).finished_summary() is not None
    if not is_complete and commit() not in (known := commits_of(run)):
        run.mkdir(parents=True, exist_ok=True)
        (run / COMMITS).write_text("".join(f"{one}\n" for one in (*known, commit())))
    subprocess.run(["bash", "launch/train.sh", recipe, *overrides], cwd=ROOT, check=True)
    return run


def commits_of(run: Path) -> list[str]:
    """Return the commits at which `train` has started a run, first `unknown` if the run was begun without such a record."""
    if (run / COMMITS).exists():
        return (run / COMMITS).read_text().splitlines()
    return [UNKNOWN] if (run / "recipe.yaml").exists() else []


def commits_sentence(runs: Mapping[str, Path]) -> str:
    """Return a sentence with the commits at which the runs of a page were trained."""
    found: dict[str, list[str]] = {}
    for name, run in runs.items():
        found.setdefault(" and then ".join(commits_of(run)), []).append(name)
    if len(found) == 1:
        return f"All runs were trained at commit {next(iter(found))}."
    parts = (f"commit {commits}: {', '.join(names)}" for commits, names in found.items())
    return f"Runs were trained at {'; '.join(parts)}."


def summary_of(run: Path) -> dict[str, Any]:
    """Return the content of a finished run's summary.json."""
    return json.loads((run / "summary.json").read_text())


def metrics_of(run: Path, tag: str) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl that have a value for `tag`."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get(tag) is not None]


def show(title: str, columns: Sequence[str], rows: Sequence[Row], words: int = 1) -> None:
    """Print one table. The first `words` columns are left-justified as words, the others right-justified as numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < words else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)


def lowest_in_bold(rows: Sequence[Row], column: int) -> list[Row]:
    """Return the rows with the lowest number of a column in bold, in Markdown."""
    lowest = min((float(row[column]) for row in rows), default=math.nan)
    return [
        tuple(f"**{cell}**" if i == column and float(cell) == lowest else cell for i, cell in enumerate(row))
        for row in rows
    ]


def markdown(columns: Sequence[str], rows: Sequence[Row], words: int = 1) -> str:
    """Return the table that `show` prints, in Markdown."""
    sides = ["---" if index < words else "---:" for index in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, sides, *rows))


def missing_sentence(reasons: Mapping[str, str]) -> str:
    """Return a sentence with what could not be measured and why, empty if everything was."""
    parts = (f"{what} ({why})" for what, why in reasons.items())
    return f"Not measured: {'; '.join(parts)}." if reasons else ""


def provenance() -> str:
    """Return one line of a page with the command, the commit, the versions and the machine."""
    command = shlex.join(["python", _relative(sys.argv[0]), *map(_portable, sys.argv[1:])])
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"`{command}`, commit {commit()}, {', '.join(versions)}, {cores} cores, {platform.machine()}"


def commit(tree: Path = ROOT) -> str:
    """Return the commit of a checkout: $LLMTRAIN_COMMIT for this one, or else git's, or `unknown`. It ends in `-dirty` if a
    tracked file has changed since, other than results."""
    if tree == ROOT and (given := os.environ.get(COMMIT)):
        return given

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=tree, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
        return git("describe", "--always") + ("-dirty" if changed else "") or UNKNOWN
    except OSError:  # no git
        return UNKNOWN


def write_page(folder: Path, title: str, paragraphs: Sequence[str]) -> None:
    """Replace a results folder by a new one with a README.md."""
    made_by = provenance()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("\n\n".join([f"# {title}", made_by, *paragraphs]) + "\n")


def keep_runs(runs: Mapping[str, Path], folder: Path) -> None:
    """Write runs.tar.xz with the files by which the numbers of the runs can be checked, in a folder per run."""

    def without_origin(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        return entry.replace(mtime=0, mode=0o644, uid=0, gid=0, uname="", gname="", deep=False)

    with tarfile.open(folder / "runs.tar.xz", "w:xz", preset=9) as archive:
        for name, run in runs.items():
            for kept in ("metrics.jsonl", "recipe.yaml", "summary.json"):
                archive.add(run / kept, f"{name}/{kept}", filter=without_origin)


def _portable(word: str) -> str:
    key, sign, value = word.rpartition("=")
    return f"{key}{sign}{_relative(value)}" if Path(value).is_absolute() else word


def _relative(text: str) -> str:
    """Return the path of a file or folder relative to the repository, where runs start, so that pages name no folder of this
    machine. Other text is returned unchanged."""
    return os.path.relpath(text, ROOT) if os.path.exists(text) else text
