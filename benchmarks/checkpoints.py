"""Time for which training stands still for a checkpoint.

    python benchmarks/checkpoints.py                                          # GPT-Neo 125M with EDiT, two minutes a turn

Trains a recipe for a few steps with a checkpoint every 8 steps, in turn with and without `checkpoint.background`. Prints one
table: per checkpoint, the seconds for which training stood still, the seconds until it was on the disk, and its size. With
`--write`, the table goes to benchmarks/results/checkpoints/.
"""

from __future__ import annotations

import itertools
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loops import is_asked
from table import RESULTS, ROOT, Row, markdown, metrics_of, parser, show, write_page
from wires import parameters_of

RECIPE = "recipes/edit_gpt_neo_125m.yaml"
OVERRIDES = (
    "data.source=stdlib",
    "data.validation=null",
    "data.validation_fraction=0.05",
    "data.tokenizer=train:4096",
    "model.config.vocab_size=50257",
    "train.tokens=null",
    "train.steps=25",
    "train.sequence_length=32",
    "train.micro_batch=1",
    "schedule.warmup_steps=2",
    "sync.warmup_steps=2",
    "sync.period.every=4",
    "parallel.shards=1",
    "parallel.precision=fp32",
    "parallel.compile=false",
    "checkpoint.every=8",
    "checkpoint.keep=1",
    "log.every=1",
    "log.tensorboard=false",
    "eval.every=null",
    "eval.tokens=64",
    "eval.sample_prompt=null",
)
COLUMNS = ("checkpoint.background", "stood still, s", "until it was on the disk, s", "size, GB", "checkpoints")
NOTES = """\
{parameters:.0f} M parameters with AdamW's moments, anchor and outer momentum in fp32, {ranks} rank(s) on this machine and its disk. Medians
(lowest to highest) over all checkpoints of a run but its first and its last. In the background training waits for the copy to
memory, and for the checkpoint before if that is still being written; digests (XXH3) are part of writing. Eight steps, {steps:.1f} s
without a checkpoint, lie between two. On a machine whose processors are busy, steps take longer during a write, because both
use the processors."""


@dataclass
class Measured:
    """Measurements with one setting: by checkpoint, seconds of standing still and of writing; bytes of the newest checkpoint."""

    stood_still: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    bytes: int = 0


def run_once(background: bool, replicas: int, extra: Sequence[str], into: Measured) -> Path:
    """Train once, add the measurements of the checkpoints to `into`, and return the run directory. Raises SystemExit if the run
    fails."""
    name = f"benchmark_checkpoints_{'background' if background else 'waiting'}"
    shutil.rmtree(ROOT / "runs" / name, ignore_errors=True)
    keys = [f"run.name={name}", "run.out_dir=runs", f"parallel.replicas={replicas}", f"train.global_batch={replicas}"]
    command = [
        "bash",
        "launch/train.sh",
        RECIPE,
        *OVERRIDES,
        *keys,
        f"checkpoint.background={str(background).lower()}",
        *extra,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    run = ROOT / "runs" / name
    stood = [line["perf/checkpoint_seconds"] for line in metrics_of(run, "perf/checkpoint_seconds")]
    taken = [later - earlier for earlier, later in itertools.pairwise(stood) if later > earlier]
    into.stood_still += taken[1:]  # all but the first; the last one follows the last log line
    into.written += [float(seconds) for seconds in re.findall(r"written in ([\d.]+) s", done.stdout)][1:-1]
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    into.bytes = sum(file.stat().st_size for file in newest.iterdir())
    return run


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train once, and return the measurements of the checkpoints, for a row of `gpu_day.py`."""
    measured = Measured()
    run_once(task["background"], 1, task["override"], measured)
    return asdict(measured)


def spread(values: Sequence[float]) -> str:
    """Return the values as text: `median (lowest to highest)`."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Train with each setting in turn, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--turns", type=int, default=2)
    arguments.add_argument("--replicas", type=int, default=1)
    arguments.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="for all runs")
    options = arguments.parse_args()
    measured = {True: Measured(), False: Measured()}
    for _ in range(options.turns):
        for background, into in measured.items():
            run = run_once(background, options.replicas, options.override, into)
    rows: list[Row] = [
        (
            str(background).lower(),
            spread(one.stood_still),
            spread(one.written),
            f"{one.bytes / 1e9:.2f}",
            str(len(one.written)),
        )
        for background, one in measured.items()
    ]
    show("A checkpoint of GPT-Neo 125M", COLUMNS, rows)
    if options.write:
        seconds = [line["perf/step_seconds"] for line in metrics_of(run, "perf/step_seconds")]
        about = {
            "parameters": parameters_of(run) / 1e6,
            "ranks": options.replicas,
            "steps": 8 * statistics.median(seconds),
        }
        write_page(RESULTS / "checkpoints", "What a checkpoint costs", [markdown(COLUMNS, rows), NOTES.format(**about)])


if __name__ == "__main__" and not is_asked(measure):
    main()
