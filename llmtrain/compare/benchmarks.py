"""Benchmarks by method: evaluations of a comparison's runs after training, and their table over the seeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from llmtrain.compare.comparison import BenchmarkSection, TrialSpec
from llmtrain.compare.measures import Results
from llmtrain.compare.results import EVALUATE_AGAIN, TrialState
from llmtrain.errors import DataError
from llmtrain.files import read_mapping
from llmtrain.run_files import EVALUATIONS
from llmtrain.suites import check_local_files, harness_version, load_suite, suite_digest, tasks_without_files
from llmtrain.train.background_eval import last_log_line

SIGNIFICANT = 0.05
"""P-value below which the table counts a difference from the baseline."""
LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "loss", "ppl", "bpb")
NOTHING = "–"
LARGE = 1000.0
"""Score from which only three significant digits are shown. An untrained model's perplexity is that large."""


def check_benchmarks(section: BenchmarkSection | None) -> None:
    """Raise UserError if evaluating a comparison's suite would fail on this machine."""
    if section is None:
        return
    _, suite, folders = load_suite(section.name, "suite.name")
    if suite.tasks:
        harness_version()
    check_local_files(suite, folders, Path(section.data_dir) if section.data_dir else None, "suite.data_dir")


def fetch_tasks(section: BenchmarkSection | None, folder: Path, say: Callable[[str], None]) -> None:
    """Load all tasks of a suite in a separate process, which writes a log to `folder`. Do nothing if all tasks have
    local data. Raises DataError if a task can't be loaded, because every evaluation after the trials would fail."""
    if section is None or not tasks_without_files(*load_suite(section.name, "suite.name")[1:]):
        return
    say(f"loading the tasks of suite {section.name}")
    command = [sys.executable, "-m", "llmtrain.eval.fetch", section.name, *filter(None, [section.data_dir])]
    log = folder / "suite.log"
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise DataError(f"suite.name {section.name}: its tasks can't be loaded: {last_log_line(log)}; see {log}")


def evaluate_trials(
    planned: Sequence[TrialSpec], baseline: str, section: BenchmarkSection, say: Callable[[str], None]
) -> bool:
    """Evaluate the last checkpoint of every finished trial, the baseline's trials first, and test each other trial
    against the baseline's trial with the same condition and seed. Skip a trial whose stored result has the same suite,
    limit and baseline model. Return whether all evaluations succeeded."""
    done = [one for one in planned if one.state() == TrialState.DONE]
    bases = {(one.condition, one.seed): one for one in done if one.run == baseline}
    _, suite, folders = load_suite(section.name, "suite.name")
    digest, missing = suite_digest(suite, folders), []
    for one in sorted(done, key=lambda one: one.run != baseline):
        base = bases.get((one.condition, one.seed)) if one.run != baseline else None
        result = read_mapping(_result(one.directory, section), EVALUATE_AGAIN)
        of_base = None if base is None else read_mapping(_result(base.directory, section), EVALUATE_AGAIN)
        is_of_suite = (
            result.get("limit", section.limit) == section.limit and result.get("suite_digest", digest) == digest
        )
        is_wanted = result and is_of_suite
        if not is_wanted or (
            base is not None and not (of_base and _is_against(result, one.directory, base.directory, of_base))
        ):
            missing.append((one, base))
    succeeded = True
    for number, (one, base) in enumerate(missing, 1):
        name = f"{one.condition} · {one.run} · seed {one.seed}"
        say(f"evaluating {number} of {len(missing)}: {name}")
        code, log = _evaluate(one.directory, base.directory if base is not None else None, section)
        result = read_mapping(_result(one.directory, section), EVALUATE_AGAIN)
        if code == 0 and result:
            say(f"{name}: {result.get('headline') or 'evaluated'}")
        else:
            succeeded = False
            say(f"{name}: the evaluation failed (exit code {code}): {last_log_line(log)}; see {log}")
    return succeeded


def _result(directory: Path, section: BenchmarkSection) -> Path:
    return directory / EVALUATIONS / f"{load_suite(section.name, 'suite.name')[0]}.json"


def _is_against(result: dict[str, Any], directory: Path, base: Path, of_base: dict[str, Any] | None) -> bool:
    """Return whether the result of the run in `directory` has tests against the run in `base` and, if `of_base` is
    given, against the model of that result. Only the relative path from the run to the baseline's export counts,
    because the absolute paths in a result are those of the machine that made it."""
    model, other = result.get("model"), result.get("against", {}).get("baseline")
    if model is None or other is None:
        return False
    if of_base is not None and Path(other).name != Path(of_base.get("model", other)).name:
        return False  # tested against an earlier checkpoint
    digests = (result["against"].get("digest"), (of_base or {}).get("digest"))
    if None not in digests and digests[0] != digests[1]:
        return False  # tested against the same step of the baseline before it was trained again
    position = os.path.relpath(other, Path(model).parent.parent)  # from the run to the export of the other one
    return Path(os.path.abspath(directory / position)).is_relative_to(os.path.abspath(base))


def _evaluate(directory: Path, base: Path | None, section: BenchmarkSection) -> tuple[int, Path]:
    """Run `llmtrain eval` on the CPU in a separate process. Return the exit code and the path of the log."""
    command = [sys.executable, "-m", "llmtrain", "eval", directory, "--suite", section.name, "--device", "cpu"]
    command += ["--limit", section.limit] if section.limit is not None else []
    command += ["--data-dir", section.data_dir] if section.data_dir is not None else []
    command += ["--baseline", base] if base is not None else []
    log = directory / EVALUATIONS / "log" / f"{Path(section.name).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(list(map(str, command)), env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    return ended.returncode, log


def benchmark_tables(results: Results) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield (suite, condition, table) for every suite on which finished trials have been evaluated. A table has one row
    per score and one column per run. A cell has the median over the seeds, the range if the seeds differ, and the
    number of seeds for which the run is significantly better or worse than the baseline's trial with the same seed.
    Tests against other runs are not counted.
    """
    trials = [trial for trial in results.trials["trial"].dropna() if trial.state == TrialState.DONE]
    bases = {(trial.condition, trial.seed): trial for trial in trials if trial.run == results.baseline}
    for suite in dict.fromkeys(name for trial in trials for name in trial.benchmarks):
        for condition in results.targets:
            runs: dict[str, list[dict[str, Any]]] = {}
            for trial in trials:
                if trial.condition == condition and suite in trial.benchmarks:
                    result, base = trial.benchmarks[suite], bases.get((condition, trial.seed))
                    of_base = None if base is None else base.benchmarks.get(suite)
                    if base is None or not _is_against(result, trial.path, base.path, of_base):
                        result = {key: value for key, value in result.items() if key != "against"}
                    runs.setdefault(trial.run, []).append(result)
            if runs:
                yield suite, condition, table_over_seeds(runs, results.baseline)


def table_over_seeds(runs: Mapping[str, Sequence[Mapping[str, Any]]], baseline: str) -> pd.DataFrame:
    """Return a table with a row per score and a column per run. `runs` maps each run to its results of `llmtrain eval`,
    one per seed. `benchmark_tables` describes the cells."""
    everything = [result for of_run in runs.values() for result in of_run]
    rows = []
    for task, metric in dict.fromkeys(tuple(row) for result in everything for row in result.get("shown", [])):
        counts = {result["results"].get(task, {}).get("n") for result in everything} - {None}
        chance = _first(result["tasks"].get(task, {}).get("chance") for result in everything)
        windows = {result["tasks"].get(task, {}).get("window") for result in everything} - {None}
        documents = _either(counts) or NOTHING
        has_chance = chance is not None and metric.startswith("acc")
        row = {
            "task": task,
            "metric": metric,
            "documents": f"{documents}, windows of {_either(windows)}" if len(windows) > 1 else documents,
            "chance": f"{chance:.3f}" if has_chance else NOTHING,
        }
        for run, of_run in runs.items():
            title = f"{run} (baseline)" if run == baseline else run
            row[title] = _cell(of_run, task, metric)
        rows.append(row)
    return pd.DataFrame(rows)


def _cell(of_run: Sequence[Mapping[str, Any]], task: str, metric: str) -> str:
    """Return the text of a cell: a run's median over the seeds, the range if the seeds differ, and the number of
    significant differences."""
    values = [result["results"].get(task, {}).get(metric) for result in of_run]
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    ends = (float(np.median(known)), min(known), max(known))
    median, low, high = (f"{value:.3f}" if abs(value) < LARGE else f"{value:.3g}" for value in ends)
    tests = [test for result in of_run for test in result.get("against", {}).get("scores", [])]
    found = [test for test in tests if (test["task"], test["metric"]) == (task, metric)]
    sign = -1 if metric in LOWER_IS_BETTER else 1
    for word, factor in (("better", sign), ("worse", -sign)):
        count = sum(test["p"] < SIGNIFICANT and factor * test["difference"] > 0 for test in found)
        median += f" {word} in {count} of {len(found)}" if count else ""
    return median if low == high else f"{median} ({low} to {high})"


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(numbers))


def _first(values: Iterable[Any]) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)
