"""Start of this tree and of another checkout: seconds from the command to its first line and to the first logged step.

    git worktree add --detach ../llmtrain-before 5ed7e1e
    python benchmarks/start.py --against ../llmtrain-before --write     # 10 turns, about ten minutes on two idle cores
    python benchmarks/start.py --turns 3

In each turn, both trees launch recipes/quickstart.yaml in new interpreters, one after the other, on prepared data: first each
tree's own version of the recipe, then the model, batch and text of the recipe in 5ed7e1e. The run is killed once step 1 is
logged. CPU seconds are those of the launcher and all its processes until then. On a machine that does other work, compare only
the CPU seconds. With `--write`, the table goes to benchmarks/results/start/.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from table import RESULTS, ROOT, Row, commit, markdown, parser, show, write_page

RECIPE = "recipes/quickstart.yaml"
SAME = (
    "data.source=stdlib",
    "model.config={hidden_size: 160, intermediate_size: 432, num_hidden_layers: 4, num_attention_heads: 5}",
    "train.sequence_length=128",
    "train.global_batch=32",
    "train.micro_batch=8",
    "train.steps=300",
    "eval.tokens=40_000",
)
"""The quickstart of 5ed7e1e, in keys that both trees have."""
KEYS: Mapping[str, Sequence[str]] = {"its own quickstart": (), "the quickstart of 5ed7e1e": SAME}
LOGGED = "step 1/"
COLUMNS = ("tree", "recipe", "first line, s", "first logged step, s", "CPU s until then")


class Start(NamedTuple):
    """Measured seconds of one start."""

    first_line: float
    first_step: float
    cpu: float


class Tree(NamedTuple):
    """A checkout, and a folder for its tokens and runs."""

    name: str
    path: Path
    scratch: Path

    def command(self, subcommand: str, keys: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "llmtrain", subcommand, RECIPE, f"data.cache_dir={self.scratch}/data", *keys]

    def prepare(self, keys: Sequence[str]) -> None:
        """Tokenize the text, so that no start does."""
        subprocess.run(self.command("prepare", keys), cwd=self.path, check=True, stdout=subprocess.DEVNULL)

    def start(self, keys: Sequence[str]) -> Start:
        """Launch a new run and kill it once its first step is logged."""
        with tempfile.TemporaryDirectory(dir=self.scratch, ignore_cleanup_errors=True) as runs:
            command = self.command("launch", [*keys, f"run.out_dir={runs}"])
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            began, lines = time.monotonic(), []
            process = subprocess.Popen(
                command,
                cwd=self.path,
                env=environment,
                text=True,
                bufsize=1,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            try:
                for line in process.stdout:
                    lines.append((time.monotonic() - began, line))
                    if line.startswith(LOGGED):
                        return Start(lines[0][0], lines[-1][0], cpu_seconds(process.pid))
            finally:
                kill_family(process)
        raise SystemExit(f"{self.path}: no step was logged:\n{''.join(line for _, line in lines)}")


def family(launcher: int) -> list[psutil.Process]:
    """Return a launcher and all of its descendants."""
    process = psutil.Process(launcher)
    return [process, *process.children(recursive=True)]


def cpu_seconds(launcher: int) -> float:
    """Return the CPU seconds of a launcher and all of its descendants, including those that have ended."""
    return sum(sum(process.cpu_times()[:4]) for process in family(launcher))


def kill_family(process: subprocess.Popen) -> None:
    """Kill a launcher and all of its descendants, and wait for their end."""
    members = family(process.pid)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(members[1:])
    process.stdout.close()


def quartiles(values: Sequence[float], digits: int) -> str:
    """Return the median and the quartiles, for example `4.1 (4.0 to 4.3)`."""
    lower, median, upper = statistics.quantiles(values, method="inclusive") if len(values) > 1 else [*values] * 3
    return f"{median:.{digits}f} ({lower:.{digits}f} to {upper:.{digits}f})"


def rows(measured: Mapping[tuple[str, str], Sequence[Start]]) -> list[Row]:
    """Return a row per tree and recipe."""
    digits = (2, 1, 1)
    return [
        (*names, *(quartiles(values, n) for values, n in zip(zip(*starts, strict=True), digits, strict=True)))
        for names, starts in measured.items()
    ]


def ratios_of(measured: Mapping[tuple[str, str], Sequence[Start]], this: str, other: str) -> str:
    """Return a sentence with the seconds to the first logged step of one tree, divided by those of the other tree."""
    found = []
    for recipe in KEYS:
        pairs = zip(measured[this, recipe], measured[other, recipe], strict=True)
        ratios = [ours.first_step / theirs.first_step for ours, theirs in pairs]
        found.append(f"{quartiles(ratios, 2)} with {recipe}")
    return (
        f"Seconds of {this} to the first logged step, divided by those of {other} in the same turn: {', '.join(found)}."
    )


def main() -> None:
    """Measure the trees in turn, print the table, and write the page if `--write` is given."""
    options = parser(__doc__)
    options.add_argument("--against", type=Path, help="another checkout, for example a git worktree of 5ed7e1e")
    options.add_argument("--turns", type=int, default=10)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trees = [Tree(f"this ({commit()})", ROOT, Path(folder, "this"))]
        if chosen.against is not None:
            other = chosen.against.resolve()
            trees.append(Tree(commit(other), other, Path(folder, "other")))
        for tree in trees:
            tree.scratch.mkdir()
            for keys in KEYS.values():
                tree.prepare(keys)
        measured: dict[tuple[str, str], list[Start]] = {(tree.name, recipe): [] for tree in trees for recipe in KEYS}
        for turn in range(chosen.turns):
            for recipe, keys in KEYS.items():
                for tree in trees if turn % 2 else reversed(trees):
                    measured[tree.name, recipe].append(tree.start(keys))
                    print(json.dumps([turn, tree.name, recipe, *measured[tree.name, recipe][-1]]), flush=True)
    table = rows(measured)
    show("Start", COLUMNS, table, words=2)
    ratio = [ratios_of(measured, trees[0].name, trees[1].name)] if len(trees) > 1 else []
    print(*ratio)
    if chosen.write:
        note = f"Medians and quartiles of {chosen.turns} turns. Data was prepared before."
        write_page(RESULTS / "start", "Start", [markdown(COLUMNS, table, words=2), *ratio, note])


if __name__ == "__main__":
    main()
