"""Evaluate the study's models of the second text on benchmarks, each with a paired test against synchronous training with its seed.

    python benchmarks/study/study_benchmarks.py --data-dir DIR

DIR holds the files of benchmarks.yaml (eval/README.md). The models are in the folders that study_runs.py keeps. Results are lines
of benchmarks/results/study/benchmarks.jsonl, which `python benchmarks/study/study_page.py --write` puts into the page. The same
command continues what was interrupted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study_losses import synchronous_beside
from study_plan import FINAL_SEEDS, Cell, Records
from study_runs import RECORDS, RUNS, append, read_records
from study_stages import STAGES
from table import ROOT, Row, commit

from llmtrain.compare.benchmarks import table_over_seeds
from llmtrain.errors import ResultsError
from llmtrain.run_files import EVALUATIONS

BENCHMARK_RECORDS = RECORDS.parent / "benchmarks.jsonl"
SUITE, LIMIT = ROOT / "benchmarks" / "study" / "benchmarks.yaml", 500
"""Suite, and documents per task or member of a group."""
KEPT = ("shown", "results", "tasks", "against", "measured")
"""Parts of a result of `llmtrain eval` that a record has."""


def evaluate(cell: Cell, seed: int, data_dir: Path) -> dict[str, Any]:
    """Evaluate a cell's final run, and return its record. Raises ResultsError if that fails."""
    name, beside = (f"{one.name}-final-{seed}" for one in (cell, synchronous_beside(cell)))
    command = [sys.executable, "-m", "llmtrain", "eval", RUNS / name, "--suite", SUITE, "--data-dir", data_dir]
    command += ["--limit", LIMIT, "--device", "cpu", *(["--baseline", RUNS / beside] if name != beside else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if (code := subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=False).returncode) != 0:
        raise ResultsError(
            f"{name} could not be evaluated (exit code {code}); see above, then start the same command again"
        )
    result = json.loads((RUNS / name / EVALUATIONS / f"{SUITE.stem}.json").read_text())
    kept = {key: result[key] for key in KEPT if key in result}
    return {"id": name, "label": cell.label, "seed": seed, "commit": commit(), "limit": LIMIT, **kept}


def benchmark_rows(records: Mapping[str, Mapping[str, Any]], done: Records) -> tuple[tuple[str, ...], list[Row]]:
    """Return columns and rows of the table over the seeds, whose first row is of the validation text in the study's records `done`.
    There are no rows unless all cells have a record for every seed."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    losses: dict[str, list[float]] = {}
    for cell in STAGES["text"]:
        ids = [f"{cell.name}-final-{seed}" for seed in FINAL_SEEDS]
        if any(name not in records or name not in done for name in ids):
            return (), []
        runs[cell.tuned.label] = [records[name] for name in ids]
        losses[cell.tuned.label] = sorted(done[name]["bits_per_byte"] for name in ids)
    table = table_over_seeds(runs, next(iter(runs)))
    first = ("validation text", "bits per byte", "", "")
    cells = [f"{middle:.3f} ({low:.3f} to {high:.3f})" for low, middle, high in losses.values()]
    rows = [tuple(map(str, row)) for row in table.itertuples(index=False)]
    return tuple(table.columns), [(*first, *cells), *rows]


def main() -> None:
    """Evaluate the runs that have no record, one seed per core at a time."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with the files of the suite")
    data_dir = parser.parse_args().data_dir.resolve()

    def evaluate_all(seed: int) -> None:
        for cell in STAGES["text"]:
            if f"{cell.name}-final-{seed}" not in read_records(BENCHMARK_RECORDS):
                append(evaluate(cell, seed, data_dir), BENCHMARK_RECORDS)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(evaluate_all, FINAL_SEEDS))


if __name__ == "__main__":
    main()
