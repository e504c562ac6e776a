"""Tests of the benchmarks of a comparison: which trials are evaluated against which, and what the report shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.compare import benchmarks
from llmtrain.compare.benchmarks import benchmark_tables, check_benchmarks, evaluate_trials, fetch_tasks
from llmtrain.compare.comparison import BenchmarkSection, TrialSpec, load_comparison
from llmtrain.compare.measures import gather
from llmtrain.compare.report import write_report
from llmtrain.compare.results import benchmarks_of, load_trials
from llmtrain.errors import DataError, RecipeError, ResultsError, SuiteError
from tests.unit.written_trials import straight, write_trial

SUITE = BenchmarkSection(name="tinystories", limit=7, data_dir="texts")
SHOWN = [["arc_easy", "acc"], ["arc_easy", "bits_per_byte"], ["valid", "loss"]]


def result(
    acc: float,
    bits: float,
    loss: float | None,
    against: dict[str, tuple[float, float]] | None = None,
    *,
    model: str | Path = "runs/plain/diloco/seed-1",
    baseline: str | Path = "runs/plain/synchronous/seed-1",
) -> dict:
    """Return a result as `llmtrain eval` writes it. `against` maps metrics of arc_easy to (difference, p). `model` and
    `baseline` are run directories."""
    found: dict[str, Any] = {
        "suite": "tinystories",
        "model": f"{model}/export/step-00000010",
        "headline": f"arc_easy acc {acc:.3f}",
        "shown": SHOWN,
        "results": {"arc_easy": {"acc": acc, "bits_per_byte": bits, "n": 1200}, "valid": {"loss": loss, "n": 30}},
        "tasks": {"arc_easy": {"chance": 0.25}, "valid": {}},
    }
    if against is not None:
        scores = [{"task": "arc_easy", "metric": m, "difference": d, "p": p} for m, (d, p) in against.items()]
        found["against"] = {"baseline": f"{baseline}/export/step-00000010", "scores": scores}
    return found


def write_result(trial: Path, content: dict[str, Any], name: str = "tinystories") -> None:
    (trial / "eval").mkdir(exist_ok=True)
    (trial / "eval" / f"{name}.json").write_text(json.dumps(content))


def evaluated(folder: Path) -> None:
    """Write evaluated trials of two runs with three seeds each. The last trial of diloco has failed."""
    for seed, (ours, theirs) in enumerate(((0.31, 0.30), (0.33, 0.36), (0.32, 0.29)), 1):
        write_result(write_trial(folder, "plain", "synchronous", seed, straight(60, 4.0)), result(ours, 2.0, 3.5))
        state = "done" if seed < 3 else "failed"
        trial = write_trial(folder, "plain", "diloco", seed, straight(50, 4.1), state=state)
        significant = {"acc": (theirs - ours, 0.001 if seed == 2 else 0.4), "bits_per_byte": (0.1 * seed, 0.01)}
        paths = {"model": trial, "baseline": folder / "plain" / "synchronous" / trial.name}
        write_result(trial, result(theirs, 2.0 + 0.1 * seed, None, significant, **paths))


def test_a_table_has_medians_over_seeds_and_the_differences_that_are_significant(tmp_path: Path) -> None:
    evaluated(tmp_path)
    results = gather(load_trials([tmp_path]), "synchronous")
    [(suite, condition, table)] = benchmark_tables(results)
    assert (suite, condition) == ("tinystories", "plain")
    assert table.to_dict("records") == [
        {
            "task": "arc_easy",
            "metric": "acc",
            "documents": "1,200",
            "chance": "0.250",
            "synchronous (baseline)": "0.320 (0.310 to 0.330)",
            "diloco": "0.330 better in 1 of 2 (0.300 to 0.360)",
        },
        {
            "task": "arc_easy",
            "metric": "bits_per_byte",
            "documents": "1,200",
            "chance": "–",
            "synchronous (baseline)": "2.000",
            "diloco": "2.150 worse in 2 of 2 (2.100 to 2.200)",
        },
        {
            "task": "valid",
            "metric": "loss",
            "documents": "30",
            "chance": "–",
            "synchronous (baseline)": "3.500",
            "diloco": "–",
        },
    ]


def test_other_numbers_of_documents_and_other_windows_are_named(tmp_path: Path) -> None:
    for seed, count in ((1, 5), (2, 1000)):
        content = result(0.3, 2.0, None)
        content["results"]["arc_easy"]["n"] = content["tasks"]["valid"]["window"] = count
        write_result(write_trial(tmp_path, "plain", "synchronous", seed, straight(60, 4.0)), content)
    [(_, _, table)] = benchmark_tables(gather(load_trials([tmp_path]), "synchronous"))
    assert list(table["documents"]) == ["5 or 1,000", "5 or 1,000", "30, windows of 5 or 1,000"]


def cells(folder: Path, baseline: str) -> dict[str, str]:
    """Return the first row of the table, which has the accuracies, by title of the column."""
    [(_, _, table)] = benchmark_tables(gather(load_trials([folder]), baseline))
    return table.to_dict("records")[0]


def test_tests_count_against_the_baseline_that_they_were_made_against(tmp_path: Path) -> None:
    """The folder may have been moved since the test. Tests against a trial with another seed, or against a run that is
    not the report's baseline, do not count."""
    better = {"acc": (0.02, 0.001)}
    for seed in (1, 2, 3):
        for run in ("synchronous", "diloco", "edit"):
            trial = write_trial(tmp_path, "plain", run, seed, straight(60, 4.0))
            other = f"runs/plain/synchronous/seed-{1 if seed == 3 else seed}"
            tested = None if run == "synchronous" else better
            write_result(trial, result(0.3, 2.0, 3.5, tested, model=f"runs/plain/{run}/seed-{seed}", baseline=other))
    assert cells(tmp_path, "synchronous")["diloco"] == "0.300 better in 2 of 2"
    assert cells(tmp_path, "edit")["diloco"] == cells(tmp_path, "edit")["edit (baseline)"] == "0.300"


def test_the_report_shows_it(tmp_path: Path) -> None:
    evaluated(tmp_path)
    write_report(gather(load_trials([tmp_path]), "synchronous"), tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert text.count("## Benchmarks") == 1 and "### tinystories\n" in text
    assert (
        "| arc_easy | acc | 1,200 | 0.250 | 0.320 (0.310 to 0.330) | 0.330 better in 1 of 2 (0.300 to 0.360) |" in text
    )
    assert "0.330 better in 1 of 2</span>" in (tmp_path / "report.html").read_text()


def test_results_of_an_earlier_checkpoint_are_not_the_runs(tmp_path: Path) -> None:
    write_result(tmp_path, result(0.3, 2.0, 3.0), "tinystories-step-00000010")
    write_result(tmp_path, {"suite": "tinystories", "checkpoints": []}, "tinystories-over-time")
    assert benchmarks_of(tmp_path, 20) == {}
    write_result(tmp_path, result(0.4, 2.0, 3.0))
    assert benchmarks_of(tmp_path, 20)["tinystories"]["results"]["arc_easy"]["acc"] == 0.4
    write_result(tmp_path, result(0.4, 2.0, 3.0) | {"checkpoint_step": 10})
    assert benchmarks_of(tmp_path, 20) == {}, "the run was continued"
    write_result(tmp_path, result(0.5, 2.0, 3.0) | {"checkpoint_step": 20}, "tinystories-step-00000020")
    assert benchmarks_of(tmp_path, 20)["tinystories"]["results"]["arc_easy"]["acc"] == 0.5


def test_a_damaged_evaluation_is_deleted_alone(tmp_path: Path) -> None:
    path = write_trial(tmp_path, "plain", "diloco", 1, straight(60, 4.0)) / "eval" / "small.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(ResultsError, match=r"small\.json is damaged \(.*\); delete it and evaluate again"):
        load_trials([tmp_path])


def test_tests_against_an_earlier_checkpoint_of_the_baseline_do_not_count(tmp_path: Path) -> None:
    base = write_trial(tmp_path, "plain", "synchronous", 1, straight(60, 4.0))
    trial = write_trial(tmp_path, "plain", "diloco", 1, straight(60, 4.0))
    write_result(base, result(0.2, 2.0, 3.5, model=base))
    write_result(trial, result(0.3, 2.0, 3.5, {"acc": (0.1, 0.001)}, model=trial, baseline=base))
    assert cells(tmp_path, "synchronous")["diloco"] == "0.300 better in 1 of 1"
    write_result(base, result(0.2, 2.0, 3.5, model=base) | {"model": f"{base}/export/step-00000020"})
    assert cells(tmp_path, "synchronous")["diloco"] == "0.300"


def test_tests_against_a_baseline_that_was_trained_again_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, trial = (write_trial(tmp_path, "plain", run, 1, straight(60, 4.0)) for run in ("synchronous", "diloco"))
    tested = result(0.3, 2.0, 3.5, {"acc": (0.1, 0.001)}, model=trial, baseline=base)
    tested["against"]["digest"] = "first"
    write_result(trial, tested)
    evaluated = []
    monkeypatch.setattr(benchmarks, "_evaluate", lambda one, *_: (evaluated.append(one.parent.name) or 1, Path("log")))
    monkeypatch.setattr(benchmarks, "last_log_line", lambda log: "no")
    both = planned(tmp_path, ("plain", "diloco", 1), ("plain", "synchronous", 1))
    for digest, again, cell in (
        ("first", [], "0.300 better in 1 of 1"),
        ("second", ["diloco"], "0.300"),
        (None, ["synchronous", "diloco"], None),
    ):
        write_result(base, {} if digest is None else result(0.2, 2.0, 3.5, model=base) | {"digest": digest})
        evaluated.clear()
        assert evaluate_trials(both, "synchronous", SUITE, lambda line: None) == (not again) and evaluated == again
        assert cell is None or cells(tmp_path, "synchronous")["diloco"] == cell


def planned(folder: Path, *names: tuple[str, str, int]) -> list[TrialSpec]:
    return [
        TrialSpec(condition, run, seed, Path("recipe.yaml"), (), folder / condition / run / f"seed-{seed}", ())
        for condition, run, seed in names
    ]


def test_finished_trials_are_evaluated_once_and_against_the_baseline_of_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [(condition, run, seed) for seed in (1, 2) for condition in ("fast", "slow") for run in ("a", "base")]
    for condition, run, seed in names[:-1]:
        state = "failed" if (condition, run, seed) == ("slow", "a", 1) else "done"
        write_trial(tmp_path, condition, run, seed, straight(50, 4.0), state=state)
    commands, said = [], []
    fails = {"fast-a-2"}

    def run(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> SimpleNamespace:
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        trial = Path(command[4])
        name = "-".join((*trial.parts[-3:-1], trial.name.removeprefix("seed-")))
        commands.append((name, command[5:]))
        if name in fails:
            stdout.write("error: no more memory\n")
            return SimpleNamespace(returncode=2)
        given = {"against": {}, "baseline": command[-1]} if "--baseline" in command else {}
        write_result(trial, result(0.3, 2.0, 3.0, model=trial, **given))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(benchmarks.subprocess, "run", run)
    everything = planned(tmp_path, *names)
    assert not evaluate_trials(everything, "base", SUITE, said.append)
    options = ["--suite", "tinystories", "--device", "cpu", "--limit", "7", "--data-dir", "texts"]
    against = [*options, "--baseline", str(tmp_path / "fast/base/seed-1")]
    # On the slow network, the baseline has not finished with seed 2, and run a has failed with seed 1.
    assert [name for name, _ in commands] == [
        "fast-base-1",
        "slow-base-1",
        "fast-base-2",
        "fast-a-1",
        "fast-a-2",
        "slow-a-2",
    ]
    given = dict(commands)
    assert given["fast-base-1"] == options == given["slow-a-2"] and given["fast-a-1"] == against
    assert "fast · a · seed 1: arc_easy acc 0.300" in said
    assert any("fast · a · seed 2: the evaluation failed (exit code 2): no more memory; see " in line for line in said)
    fails.clear()
    assert evaluate_trials(everything, "base", SUITE, said.append)
    assert [name for name, _ in commands[6:]] == ["fast-a-2"]
    assert evaluate_trials(everything, "base", SUITE, said.append) and len(commands) == 7
    write_trial(tmp_path, *names[-1], straight(50, 4.0))
    assert evaluate_trials(everything, "base", SUITE, said.append)
    assert [name for name, _ in commands[7:]] == ["slow-base-2", "slow-a-2"]
    assert commands[-1][1][-1] == str(tmp_path / "slow/base/seed-2")
    assert evaluate_trials(everything, "a", SUITE, said.append)
    assert [name for name, _ in commands[9:]] == ["fast-base-1", "fast-base-2", "slow-base-2"], "another baseline"
    elsewhere = tmp_path / "fast/base/seed-2/eval/tinystories.json"
    elsewhere.write_text(elsewhere.read_text().replace("fast/a/seed-2", "fast/a/seed-1"))
    assert evaluate_trials(everything, "a", SUITE, said.append)
    assert [name for name, _ in commands[12:]] == ["fast-base-2"]
    for limit, names in ((7, []), (None, ["fast-base-2"])):
        elsewhere.write_text(json.dumps(json.loads(elsewhere.read_text()) | {"limit": limit}))
        begun = len(commands)
        assert evaluate_trials(everything, "a", SUITE, said.append)
        assert [name for name, _ in commands[begun:]] == names, "only a result with the limit of the suite is kept"
    elsewhere.write_text(json.dumps(json.loads(elsewhere.read_text()) | {"suite_digest": "of another suite"}))
    begun = len(commands)
    assert evaluate_trials(everything, "a", SUITE, said.append)
    assert [name for name, _ in commands[begun:]] == ["fast-base-2"]


def test_tasks_from_the_hub_are_loaded_once_before_the_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, said = [], []

    def run(command: list[str], stdout: Any, **_: Any) -> SimpleNamespace:
        commands.append(command[2:])
        stdout.write("error: task piqa: its data is not available\n" if "small" in command else "")
        return SimpleNamespace(returncode=2 if "small" in command else 0)

    monkeypatch.setattr(benchmarks.subprocess, "run", run)
    (tmp_path / "mine.yaml").write_text("tasks: [{task: piqa}]\ntexts: [{name: valid, file: valid.jsonl}]\n")
    mine = BenchmarkSection(name=str(tmp_path / "mine.yaml"), data_dir="texts")
    for section in (None, SUITE, BenchmarkSection(name="offline", data_dir="texts")):
        fetch_tasks(section, tmp_path, said.append)
    assert commands == said == [], "all data is local"
    fetch_tasks(mine, tmp_path, said.append)
    assert commands == [["llmtrain.eval.fetch", mine.name, "texts"]]
    with pytest.raises(
        DataError, match=r"^suite\.name small: its tasks can't be loaded: task piqa: .*; see .*suite\.log$"
    ):
        fetch_tasks(BenchmarkSection(name="small"), tmp_path, said.append)
    assert said == [f"loading the tasks of suite {mine.name}", "loading the tasks of suite small"]


def test_a_suite_that_cannot_be_run_is_refused_before_the_first_trial(tmp_path: Path) -> None:
    check_benchmarks(None)
    with pytest.raises(SuiteError, match=r"^suite\.name"):
        check_benchmarks(BenchmarkSection(name="unknown"))
    with pytest.raises(DataError, match=r"suite\.data_dir"):
        check_benchmarks(BenchmarkSection(name="tinystories"))
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: r.yaml\nruns: {a: {}}\nsuite: offline\n")
    assert load_comparison(file).suite == BenchmarkSection(name="offline")
    file.write_text("recipe: r.yaml\nruns: {a: {}}\nsuite: {name: offline, limit: 0}\n")
    with pytest.raises(RecipeError, match=r"suite\.limit is 0"):
        load_comparison(file)
