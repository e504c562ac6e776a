"""Cost of replicas that share a process, beside processes of their own.

    python benchmarks/in_process.py --turns 5 --write

Trains the study's model (0.32 M parameters, 4 replicas, DiLoCo with H = 10) for 40 steps on this machine's CPU, in turn: as four
processes with one thread each, as one process with one thread and with one thread per core, and as two such runs at a
time with one thread each. Nothing else may run meanwhile. About three minutes per turn on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loops import quartiles, take_turns
from table import RESULTS, ROOT, Row, markdown, parser, show, write_page

COLUMNS = ("4 replicas as", "tokens/s, median", "quartiles", "memory", "to the first step")
REPLICAS, SKIPPED_LINES = 4, 1
"""The first line of a run's metrics is of its first step, which is slower."""
KEYS = (
    *("sync.method=diloco", "sync.period.every=10", "optim.lr=0.008", "train.steps=40", "train.global_batch=64"),
    *("train.micro_batch=16", "schedule.warmup_steps=4", "checkpoint.every=null", "eval.every=null", "log.every=10"),
    *("parallel.replicas=4", "parallel.shards=1"),
)
NOTES = """\
Tokens per second are counted from step 10 on, over all replicas and, where two runs share the machine, over both runs. Memory is the
resident memory of the largest process of a run at its peak, times the run's processes and summed over runs; pages of files that
processes share are counted for each. The arithmetic is the same in all rows, and it is most of a step: in one process a replica
computes while the others wait, so cores beyond the first are used by the threads of its matrix products, which are small here, or
by another run."""


@dataclass(frozen=True)
class Way:
    """A way to train four replicas."""

    name: str
    in_process: bool
    threads: int
    at_a_time: int = 1


def ways(cores: int) -> tuple[Way, ...]:
    """Return the ways to compare on a machine with so many cores."""
    return (
        Way("4 processes, one thread each", False, 1),
        Way("one process, one thread", True, 1),
        Way(f"one process, {cores} threads", True, cores),
        Way("two runs at a time, one process with one thread each", True, 1, at_a_time=2),
    )


def measure(way: Way) -> tuple[float, float, float]:
    """Train, and return (tokens per second, GiB of memory, seconds to the first step)."""
    names = [f"in-process-{number}" for number in range(way.at_a_time)]
    folder = ROOT / "runs" / "in_process"
    environment = {**os.environ, "OMP_NUM_THREADS": str(way.threads), "CUDA_VISIBLE_DEVICES": ""}
    started = []
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
        keys = [
            *KEYS,
            f"parallel.in_process={str(way.in_process).lower()}",
            f"run.name={name}",
            f"run.out_dir={folder}",
        ]
        command = [sys.executable, "-m", "llmtrain", "launch", "benchmarks/study/study.yaml", *keys]
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate()[0] for process in started]
    for process, output in zip(started, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"{way.name}: {output.splitlines()[-1]}")
    rates = [rate_and_memory(folder / name) for name in names]
    first = [float(line.split()[2]) for output in outputs for line in output.splitlines() if "first step" in line]
    memory = sum(memory for _, memory in rates) * (1 if way.in_process else REPLICAS)
    print(f"{way.name}: {sum(rate for rate, _ in rates):,.0f} tokens/s", flush=True)
    return sum(rate for rate, _ in rates), memory, statistics.mean(first)


def rate_and_memory(run: Path) -> tuple[float, float]:
    """Return a run's tokens per second after its first lines, and the largest GiB of a process."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/tokens_per_second" in line]
    first, last = lines[SKIPPED_LINES], lines[-1]
    rate = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    return rate, last["perf/peak_memory_gib"]


def row_of(way: Way, found: Sequence[tuple[float, float, float]]) -> Row:
    """Return the row of a way, of all its turns."""
    rates, memory, first = (sorted(column) for column in zip(*found, strict=True))
    low, _, high = quartiles(rates)
    middle = statistics.median
    return (
        way.name,
        f"{middle(rates):,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        f"{middle(memory):.2f} GiB",
        f"{middle(first):.1f} s",
    )


def main() -> None:
    """Measure all ways in turn, print the table and perhaps write the page."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--turns", type=int, default=5, help="measurements of each way")
    options = options_parser.parse_args()
    compared = ways(len(os.sched_getaffinity(0)))
    found = take_turns({way.name: partial(measure, way) for way in compared}, options.turns)
    rows = [row_of(way, found[way.name]) for way in compared]
    show("Replicas in one process", COLUMNS, rows)
    if options.write:
        write_page(RESULTS / "in_process", "Replicas in one process", [NOTES, markdown(COLUMNS, rows)])


if __name__ == "__main__":
    main()
