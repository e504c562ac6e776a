"""Real run on this machine, which trains, is stopped, and continues.

    python benchmarks/gpu_run.py --override data.source=train.txt data.tokenizer=gpt2    # a GPU; minutes

Starts a run with the launcher, sends it SIGTERM at half of its steps, starts it again, and shows its loss curve and speed.
`--how share` trains two EDiT replicas that share one GPU; gloo carries their messages, so the speed says nothing. `--how "in
process"` trains four EDiT replicas in one process, which take turns. These two runs are not stopped.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loops import RECIPE, end_with_children, is_asked, on_gpu
from table import ROOT, metrics_of, parser
from throughput import SIZES

from llmtrain.errors import DONE, STOPPED_EARLY

RUN = (
    "run.name=gpu_run",
    "parallel.shards=1",
    "schedule.warmup_steps=20",
    "optim.lr=1.0e-3",
    "eval.tokens=16_000",
    "eval.sample_prompt=Once upon a time",
    "eval.sample_tokens=20",
    "log.every=10",
    "log.tensorboard=false",
)
EDIT = ("sync.method=edit", "sync.warmup_steps=20", "sync.period.every=20")
ALONE, SHARE, IN_PROCESS = "alone", "share", "in process"
KEYS = {
    ALONE: ("sync.method=synchronous", "parallel.replicas=1"),
    SHARE: (*EDIT, "parallel.replicas=2"),
    IN_PROCESS: (*EDIT, "parallel.replicas=4", "parallel.in_process=true"),
}
"""Overrides of each way to train."""
LAST = 4000
"""Number of characters shown of the end of a run's output."""


def overrides_of(task: Mapping[str, Any], folder: str) -> list[str]:
    """Return the overrides of the task's run, which is written to `folder`."""
    steps, gpu = task["steps"], on_gpu()
    return [
        *SIZES[task["size"]],
        *RUN,
        *KEYS[task["how"]],
        f"run.out_dir={folder}",
        f"train.steps={steps}",
        f"train.global_batch={task['global_batch']}",
        f"eval.every={steps // 2}",
        f"checkpoint.every={steps}",  # a stopped run writes one, too, within the 30 s that torch before 2.12 gives it
        f"parallel.precision={'bf16' if gpu else 'fp32'}",
        f"parallel.compile={str(gpu).lower()}",
        *task["override"],
    ]


def start(keys: Sequence[str], how: str, output: Path) -> subprocess.Popen:
    """Start a run with the launcher, which appends its output to `output`."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if how == SHARE:
        variables["LLMTRAIN_SHARE_GPU"] = "1"
    command = [sys.executable, "-m", "llmtrain", "launch", RECIPE, *keys]
    with output.open("a") as stream:
        return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=stream, stderr=subprocess.STDOUT)


def said(output: Path) -> str:
    """Return a run's output, even if it ends within a character."""
    return output.read_text(errors="replace")


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train, and return losses, speed and where the run continued. A run alone is stopped at half of its steps and continued.

    Raises SystemExit if a start ends with another exit code than expected, or does not continue the run."""
    with tempfile.TemporaryDirectory() as folder:
        run, output, began = Path(folder) / "gpu_run", Path(folder) / "output", time.monotonic()
        keys, codes, stopped = overrides_of(task, folder), [], None
        for stops in (True, False) if task["how"] == ALONE else (False,):
            process = start(keys, task["how"], output)
            try:
                if stops:
                    stopped = _stop_at(task["steps"] // 2, run, process)
                codes.append(process.wait())
            finally:
                end_with_children(process)
            if stops:
                print(said(output)[-LAST:], flush=True)
            if codes[-1] != (STOPPED_EARLY if stops else DONE):
                raise SystemExit(f"the run ended with {codes}:\n{said(output)[-LAST:]}")
        continued = [line for line in said(output).splitlines() if "continuing from" in line]
        if len(continued) != len(codes) - 1:
            raise SystemExit(f"the run was started {len(codes)} times and continued {len(continued)} times")
        losses = {line["step"]: line["train/loss"] for line in metrics_of(run, "train/loss")}
        validation = {line["step"]: line["eval/loss"] for line in metrics_of(run, "eval/loss")}
        sample = run / "samples.txt"
        return {
            "exit_codes": codes,
            "stopped_at": stopped,
            "continued": continued,
            "losses": list(losses.items()),
            "validation": list(validation.items()),
            "mfu": _median(run, "perf/mfu"),
            "tokens_per_second": _median(run, "perf/tokens_per_second"),
            "rounds": max((line["sync/count"] for line in metrics_of(run, "sync/count")), default=0),
            "summary": json.loads((run / "summary.json").read_text()),
            "sample": sample.read_text()[:500] if sample.exists() else "",
            "seconds": time.monotonic() - began,
        }


def _stop_at(step: int, run: Path, process: subprocess.Popen) -> int:
    """Send SIGTERM once `step` is logged, and return the last logged step."""
    seen, log = 0, run / "metrics.jsonl"
    while seen < step and process.poll() is None:
        time.sleep(0.2)
        with suppress(ValueError):  # a line is being written
            seen = max((line["step"] for line in metrics_of(run, "train/loss")), default=0) if log.exists() else 0
    process.send_signal(signal.SIGTERM)
    return seen


def _median(run: Path, tag: str) -> float | None:
    values = [line[tag] for line in metrics_of(run, tag)]
    return statistics.median(values) if values else None


def main() -> None:
    """Run once and print the result."""
    arguments = parser(__doc__)
    arguments.add_argument("--size", choices=SIZES, default="160M" if on_gpu() else "6M")
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--global-batch", type=int, default=64, help="a multiple of micro-batch times replicas")
    arguments.add_argument(
        "--how", choices=KEYS, default=ALONE, help="one replica, two that share a GPU, or four in one process"
    )
    arguments.add_argument("--override", nargs="+", default=[], metavar="KEY=VALUE", help="laid over the rest")
    options = arguments.parse_args()
    keys = ("size", "steps", "global_batch", "how", "override")
    for name, value in measure({key: getattr(options, key) for key in keys}).items():
        print(f"{name}: {value}")


if __name__ == "__main__" and not is_asked(measure):
    main()
