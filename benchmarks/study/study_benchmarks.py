"""Evaluation of the study's models of the second text on benchmarks, with paired tests against synchronous training by seed.

    python benchmarks/study/study_benchmarks.py --data-dir DIR

DIR holds the files of benchmarks.yaml (eval/README.md). The models are in the folders that study_runs.py keeps. Each result is a line
of benchmarks/results/study/benchmarks.jsonl, which `python benchmarks/study/study_page.py --write` puts into the page. The same
command continues an interrupted evaluation.
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
from study_plan import FINAL_SEEDS, Records
from study_runs import RECORDS, RUNS, append, read_records
from study_stages import STAGES
from table import ROOT, Row, commit

from llmtrain.compare.benchmarks import table_over_seeds
from llmtrain.errors import ResultsError
from llmtrain.run_files import EVALUATIONS

BENCHMARK_RECORDS = RECORDS.parent / "benchmarks.jsonl"
SUITE, LIMIT = ROOT / "benchmarks" / "study" / "benchmarks.yaml", 500
"""Suite, and number of documents per task or per member of a group."""
BASELINE, *OTHERS = STAGES["text"]
MODELS = {
    BASELINE.tuned.label: f"{BASELINE.name}-final",
    f"{BASELINE.tuned.label}, half of the tokens": f"{BASELINE.name}-shorter50",
    **{cell.tuned.label: f"{cell.name}-final" for cell in OTHERS},
}
"""Models by the name of their column: ids of their runs without the seed. The second model has about DiLoCo's loss, to tell the
effect of a method from that of a higher loss."""
KEPT = ("shown", "results", "tasks", "against")
"""Keys of a result of `llmtrain eval` that a record keeps."""


def evaluate(label: str, seed: int, data_dir: Path) -> dict[str, Any]:
    """Evaluate one of MODELS, and return its record. Raises ResultsError if the evaluation fails."""
    name, beside = (f"{model}-{seed}" for model in (MODELS[label], MODELS[BASELINE.tuned.label]))
    command = [sys.executable, "-m", "llmtrain", "eval", RUNS / name, "--suite", SUITE, "--data-dir", data_dir]
    command += ["--limit", LIMIT, "--device", "cpu", *(["--baseline", RUNS / beside] if name != beside else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if (code := subprocess.run([*map(str, command)], cwd=ROOT, env=environment, check=False).returncode) != 0:
        raise ResultsError(
            f"{name} could not be evaluated (exit code {code}); see above, then start the same command again"
        )
    result = json.loads((RUNS / name / EVALUATIONS / f"{SUITE.stem}.json").read_text())
    kept = {key: result[key] for key in KEPT if key in result}
    if "against" in kept:
        kept["against"]["baseline"] = beside  # not the path of a folder of this machine
    return {"id": name, "label": label, "seed": seed, "commit": commit(), "limit": LIMIT, **kept}


def benchmark_rows(records: Mapping[str, Mapping[str, Any]], done: Records) -> tuple[tuple[str, ...], list[Row]]:
    """Return the columns and rows of the table over the seeds. Its first row is the validation text, from the study's records `done`.
    Both are empty unless every model has a record for every seed."""
    ids = {label: [f"{model}-{seed}" for seed in FINAL_SEEDS] for label, model in MODELS.items()}
    if any(name not in records or name not in done for names in ids.values() for name in names):
        return (), []
    losses = {label: sorted(done[name]["bits_per_byte"] for name in names) for label, names in ids.items()}
    runs = {label: [records[name] for name in names] for label, names in ids.items()}
    table = table_over_seeds(runs, BASELINE.tuned.label)
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
        for label, model in MODELS.items():
            if f"{model}-{seed}" not in read_records(BENCHMARK_RECORDS):
                append(evaluate(label, seed, data_dir), BENCHMARK_RECORDS)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(evaluate_all, FINAL_SEEDS))


if __name__ == "__main__":
    main()
