"""Cost of replicas that share a process, compared with one process per replica.

    python benchmarks/in_process.py --turns 5 --write
    python benchmarks/in_process.py --exo-gym FOLDER --turns 5 --write      # also EXO Gym, of which FOLDER is a checkout

Trains the study's model (0.32 M parameters, 4 replicas, DiLoCo with H = 10) for 40 steps on this machine's CPU, in turn as four
processes with one thread each, as one process with one thread, as one process with one thread per core, and as two runs at a time
of one process with one thread. With a checkout of EXO Gym (https://github.com/exo-explore/gym), its simulator trains the same model,
too (benchmarks/exo_gym.py). Run nothing else at the same time. A turn takes about three minutes on two cores.
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
from table import RESULTS, ROOT, UNKNOWN, Row, commit, markdown, parser, show, write_page

COLUMNS = ("4 replicas as", "tokens/s, median", "quartiles", "memory", "to the first step")
REPLICAS, STEPS, ROUND, MICRO_BATCH, LR, WARMUP = 4, 40, 10, 16, 0.008, 4
SKIPPED_LINES = 1
"""Number of lines skipped in a run's metrics: the line of the first step, which is slower."""
KEYS = (
    *("sync.method=diloco", f"sync.period.every={ROUND}", f"optim.lr={LR}", f"schedule.warmup_steps={WARMUP}"),
    *(f"train.steps={STEPS}", f"train.global_batch={REPLICAS * MICRO_BATCH}", f"train.micro_batch={MICRO_BATCH}"),
    *("checkpoint.every=null", "eval.every=null", f"log.every={ROUND}"),
    *(f"parallel.replicas={REPLICAS}", "parallel.shards=1"),
)
NOTES = """\
Tokens per second are counted from step 10 on, over all replicas and, where two runs share the machine, over both runs. Memory is the
resident memory of the largest process of a run at its peak, times the run's processes and summed over runs; pages of files that
processes share are counted for each. The arithmetic is the same in all rows, and it is most of a step: in one process a replica
computes while the others wait, so cores beyond the first are used by the threads of its matrix products, which are small here, or
by another run."""
EXO_GYM = "EXO Gym, 4 processes, one thread each"
EXO_GYM_NOTES = """\
EXO Gym's row is of its own trainer and DiLoCo strategy, started by benchmarks/exo_gym.py in the way that its documentation describes:
the model's `forward` returns the loss, and a function gives each node a data set of its own. Model, batches per node, AdamW (fused),
learning-rate schedule, clipping, outer optimizer and H are those of the other rows. Validation, checkpoints and W&B are off. The
measured steps are as many, with as many synchronizations, as in the other rows. Launchers are not counted as memory in any row.

What EXO Gym computes differently: It counts steps from 0, so it synchronizes after steps 11, 21 and 31. It averages the models in one
all-reduce per parameter tensor, takes the outer step on node 0 alone, and sends the result in one broadcast per tensor. All nodes
wait for each other after every step. Node 0 reads the loss of every step, and writes it to a file and a progress bar. AdamW decays
vectors as well as matrices. Batches are random tokens from memory, loaded by torch's DataLoader, whereas the other rows read prepared
text. The loss is transformers' own. Every node imports its packages anew before its first step.

The version of EXO Gym is {source}. Later versions that were read (95d41381 and 77027de9) fix gloo to `lo0`, a network interface that
macOS has and Linux does not."""


@dataclass(frozen=True)
class Way:
    """A way to train four replicas."""

    name: str
    in_process: bool
    threads: int
    at_a_time: int = 1


def ways(cores: int) -> tuple[Way, ...]:
    """Return the ways to compare on a machine with `cores` cores."""
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


def measure_exo_gym(checkout: Path) -> tuple[float, float, float]:
    """Train with EXO Gym, and return (tokens per second, GiB of memory, seconds to the first step)."""
    folder = ROOT / "runs" / "in_process" / "exo-gym"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = os.pathsep.join(filter(None, (str(checkout), str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    options = {
        "nodes": REPLICAS,
        "batch": MICRO_BATCH,
        "every": ROUND,
        "lr": LR,
        "warmup": WARMUP,
        "first": ROUND,
        "last": STEPS,
    }
    command = [sys.executable, str(ROOT / "benchmarks" / "exo_gym.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{EXO_GYM}: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{EXO_GYM}: {found['tokens_per_second']:,.0f} tokens/s", flush=True)
    return found["tokens_per_second"], REPLICAS * found["largest_gib"], found["first_step_seconds"]


def source_of(checkout: Path) -> str:
    """Return the version of EXO Gym in a folder: the text of its file SOURCE, or else git's commit."""
    if (checkout / "SOURCE").exists():
        return (checkout / "SOURCE").read_text().strip()
    return f"exo-explore/gym at commit {commit(checkout) if (checkout / '.git').exists() else UNKNOWN}"


def rate_and_memory(run: Path) -> tuple[float, float]:
    """Return a run's tokens per second after the skipped lines, and the peak GiB of its largest process."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "perf/tokens_per_second" in line]
    first, last = lines[SKIPPED_LINES], lines[-1]
    rate = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    return rate, last["perf/peak_memory_gib"]


def row_of(name: str, found: Sequence[tuple[float, float, float]]) -> Row:
    """Return a way's row of the table, with medians over the turns."""
    rates, memory, first = (sorted(column) for column in zip(*found, strict=True))
    low, _, high = quartiles(rates)
    middle = statistics.median
    return (
        name,
        f"{middle(rates):,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        f"{middle(memory):.2f} GiB",
        f"{middle(first):.1f} s",
    )


def main() -> None:
    """Measure all ways in turn, print the table, and write the page if `--write` is given."""
    options_parser = parser(__doc__)
    options_parser.add_argument("--turns", type=int, default=5, help="measurements of each way")
    options_parser.add_argument(
        "--exo-gym", type=Path, metavar="FOLDER", help="a checkout of EXO Gym, to measure it, too"
    )
    options = options_parser.parse_args()
    measurements = {way.name: partial(measure, way) for way in ways(len(os.sched_getaffinity(0)))}
    notes = [NOTES]
    if options.exo_gym:
        checkout = options.exo_gym.resolve()
        if not (checkout / "exogym" / "trainer.py").exists():
            options_parser.error(f"{options.exo_gym} has no exogym/trainer.py; give a checkout of exo-explore/gym")
        measurements[EXO_GYM] = partial(measure_exo_gym, checkout)
        notes.append(EXO_GYM_NOTES.format(source=source_of(checkout)))
    found = take_turns(measurements, options.turns)
    rows = [row_of(name, found[name]) for name in measurements]
    show("Replicas in one process", COLUMNS, rows)
    if options.write:
        write_page(RESULTS / "in_process", "Replicas in one process", [*notes, markdown(COLUMNS, rows)])


if __name__ == "__main__":
    main()
