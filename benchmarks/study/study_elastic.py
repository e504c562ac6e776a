"""Training while replicas join or leave, each of which brings its part of the batch (PROTOCOL.md, amendment on elasticity).

    python benchmarks/study/study_elastic.py

A run has four stages of equal length, with 1, 2, 4 and 8 replicas or the reverse. SIGTERM stops the run at the end of a stage, and the
next stage continues from its checkpoint, as a user would continue it. The same command continues an interrupted run. Each result is a
line of benchmarks/results/study/elastic.jsonl, which `python benchmarks/study/study_page.py --write` puts into the page.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_plan import FINAL_SEEDS, UNIT, Records
from study_runs import LOWEST, RECIPE, RECORDS, append, read_records
from study_stages import STAGES, runs_of
from table import ROOT, Row, commit

from llmtrain.errors import DONE, STOPPED_EARLY, TrainingError
from llmtrain.files import read_lines
from llmtrain.run_files import CHECKPOINTS, METRICS, complete_checkpoints

ELASTIC_RECORDS = RECORDS.parent / "elastic.jsonl"
FOLDER = ROOT / "runs" / "elastic"
ORDERS = {"joining": (1, 2, 4, 8), "leaving": (8, 4, 2, 1)}
"""Number of replicas in each stage of a run."""
STAGE_STEPS, LOG_STEPS = 6 * UNIT, 2 * UNIT
PER_REPLICA = 16
"""Sequences per replica and step, as for the 4 replicas of the main table."""
METHODS = ("synchronous", "edit")
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ElasticRun:
    """One run, with the setting that the method's trials with 4 replicas chose."""

    method: str
    order: str
    seed: int
    keys: tuple[str, ...]

    @property
    def id(self) -> str:
        """Name of the run and of its record."""
        return f"elastic-{self.method}-{self.order}-{self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return FOLDER / self.id

    @property
    def steps_done(self) -> int:
        """Step of the newest checkpoint, or 0 without any."""
        return max(complete_checkpoints(self.folder / CHECKPOINTS), default=0)

    def overrides(self, replicas: int) -> list[str]:
        """Return the overrides of study.yaml for a stage with `replicas` replicas."""
        total = STAGE_STEPS * len(ORDERS[self.order])
        return [
            *(f"run.name={self.id}", f"run.out_dir={FOLDER}", f"run.seed={self.seed}"),
            *(f"train.steps={total}", f"schedule.warmup_steps={total // 10}", f"sync.method={self.method}"),
            *(f"parallel.replicas={replicas}", f"train.global_batch={PER_REPLICA * replicas}"),
            *(f"train.micro_batch={PER_REPLICA}", f"log.every={LOG_STEPS}", f"eval.every={STAGE_STEPS}"),
            *(f"checkpoint.every={STAGE_STEPS}", "checkpoint.keep=9", *self.keys),
        ]

    def make(self, core: int) -> None:
        """Train the remaining stages on one core. Raises TrainingError if one fails."""
        stages = ORDERS[self.order]
        while (done := self.steps_done) < STAGE_STEPS * len(stages):
            number = done // STAGE_STEPS
            end, is_last = STAGE_STEPS * (number + 1), number == len(stages) - 1
            code = self._train(stages[number], None if is_last else end, core)
            if code != (DONE if is_last else STOPPED_EARLY) or self.steps_done != end:
                raise TrainingError(f"{self.id} ended with code {code} after step {self.steps_done}, {end} expected")

    def _train(self, replicas: int, end: int | None, core: int) -> int:
        """Train until the stage's last step `end`, or to the end of the run if it is None, and return the exit code."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "llmtrain", "train", RECIPE, *self.overrides(replicas)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        with (FOLDER / f"{self.id}.log").open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            os.sched_setaffinity(process.pid, {core})
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
            # A run stops at the next log line, that of the stage's last step.
            while end is not None and process.poll() is None:
                if self._last_logged_step() >= end - LOG_STEPS:
                    process.send_signal(signal.SIGTERM)
                    break
                time.sleep(POLL_SECONDS)
            return process.wait()

    def _last_logged_step(self) -> int:
        path = self.folder / METRICS
        return max((line["step"] for line in read_lines(path)), default=0) if path.exists() else 0

    def record(self) -> dict[str, Any]:
        """Return the record of a run that has ended."""
        summary = json.loads((self.folder / "summary.json").read_text())
        losses = {line["step"]: line["eval/loss"] for line in read_lines(self.folder / METRICS) if "eval/loss" in line}
        return {
            "id": self.id,
            **asdict(self),
            "commit": commit(),
            "loss": summary["final_eval_loss"],
            "after_stages": [round(losses[STAGE_STEPS * (number + 1)], 5) for number in range(len(ORDERS[self.order]))],
            "tokens": summary["tokens"],
            "rounds": summary["sync_count"],
            "bytes": summary["bytes_sent"],
        }


def elastic_runs(done: Records) -> Iterator[ElasticRun]:
    """Yield all runs. The trials in `done`, the study's records, chose the settings."""
    for seed in FINAL_SEEDS:
        for method in METHODS:
            cell = next(cell for cell in STAGES["main"] if cell.label == method)
            setting = next(run.setting for run in runs_of(cell, done) if run.kind == "final")
            period = () if method == "synchronous" else (f"sync.period.every={UNIT}",)
            for order in ORDERS:
                yield ElasticRun(method, order, seed, (*period, *setting.overrides()))


def elastic_rows(records: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row for each order and method: the mean loss after every stage, the spread of the final loss, its gap to synchronous
    training, and the traffic. Return no rows unless all runs are done."""
    if len(records) < len(ORDERS) * len(METHODS) * len(FINAL_SEEDS):
        return []
    rows = []
    for order, replicas in ORDERS.items():
        of_baseline = 0.0
        for method in METHODS:
            runs = [one for one in records.values() if (one["method"], one["order"]) == (method, order)]
            after = [mean(losses) for losses in zip(*(one["after_stages"] for one in runs), strict=True)]
            losses = [one["loss"] for one in runs]
            gap = f"{mean(losses) / of_baseline - 1:+.1%}" if of_baseline else ""
            of_baseline = of_baseline or mean(losses)
            spread, sent = (max(losses) - min(losses)) / 2, mean(one["bytes"] for one in runs) / 1e6
            stages = " → ".join(map(str, replicas))
            rows.append((stages, method, *(f"{loss:.3f}" for loss in after), f"{spread:.3f}", gap, f"{sent:.0f} MB"))
    return rows


def main() -> None:
    """Train the runs that have no record, one per core at a time."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    left = [run for run in elastic_runs(read_records()) if run.id not in read_records(ELASTIC_RECORDS)]

    def make(core: int, runs: list[ElasticRun]) -> None:
        for run in runs:
            run.make(core)
            append(record := run.record(), ELASTIC_RECORDS)
            print(f"{run.id} {record['loss']:.4f}", flush=True)

    with ThreadPoolExecutor(len(cores)) as pool:
        parts = [pool.submit(make, core, left[number :: len(cores)]) for number, core in enumerate(cores)]
        for part in parts:
            part.result()


if __name__ == "__main__":
    main()
