"""Tests of runs from training to scores: a suite during training, and the `small` suite's tasks from local files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval import units
from llmtrain.eval.command import evaluate
from llmtrain.suites import load_suite
from tests.end_to_end import forked_evaluations
from tests.end_to_end.runs import ROOT, TOKENS_A_STEP, Runs, exact_lines
from tests.mother import ADDRESS, session

pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install -c constraints.txt -e '.[eval]'"
)

SUITE = """
tasks: [{task: offline_piqa, show: [acc_norm, bits_per_byte]}]
texts: [{name: words, file: words.txt, window: 16}]
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def train(runs: Runs, name: str, *overrides: str) -> tuple[int, str]:
    """Train a run of one process, and return the exit code and the output."""
    words = runs.command(name, "parallel.replicas=1", "parallel.shards=1", *overrides)[2:]
    environment = {**runs.environment, ADDRESS: session().address}
    return runs.end(session().fork(forked_evaluations.train, *words, environment=environment, capture=True))


@pytest.fixture(scope="module")
def suite(runs: Runs) -> str:
    rows = [{"goal": f"def f{i}(x):", "sol1": "return x", "sol2": "rain the of", "label": i % 2} for i in range(8)]
    (runs.folder / "piqa").mkdir()
    (runs.folder / "piqa/validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (runs.folder / "words.txt").write_text("<|endoftext|>".join(f"import words{i}" for i in range(8)))
    (runs.folder / "quick.yaml").write_text(SUITE)
    return str(runs.folder / "quick.yaml")


@pytest.fixture(scope="module")
def quick(runs: Runs, suite: str) -> str:
    """Train 12 steps with a checkpoint every 3 steps, and return the output. Every second checkpoint is evaluated. Only
    the newest checkpoint is kept, and those whose evaluation has not ended."""
    keys = {"name": suite, "every": 2, "limit": 6, "data_dir": runs.folder, "threads": 1}
    code, output = train(
        runs, "quick", "checkpoint.keep=1", *(f"eval.suite.{key}={value}" for key, value in keys.items())
    )
    assert code == 0, output
    return output


def test_checkpoints_are_evaluated_while_training_goes_on(runs: Runs, suite: str, quick: str) -> None:
    lines, run = quick.splitlines(), runs.path("quick")
    found = {}
    for step in (6, 12):
        found[step] = json.loads((run / f"eval/quick-step-{step:08d}.json").read_text())
        assert f"step {step}/12 | quick: {found[step]['headline']}" in lines
        assert found[step]["headline"].startswith("offline_piqa acc_norm 0.")
        assert "± 0." in found[step]["headline"] and "near chance, words loss" in found[step]["headline"]
        assert found[step]["checkpoint_step"] == step and found[step]["tokens"] == step * TOKENS_A_STEP
        assert "offline_piqa" in (run / f"eval/log/quick-step-{step:08d}.log").read_text()
    assert found[12]["results"]["words"]["loss"] < found[6]["results"]["words"]["loss"]
    assert found[12]["results"]["offline_piqa"]["n"] == 6
    assert not list(run.glob("eval/quick-step-0000000[39]*.json"))
    assert next(line for line in lines if "Trained 12 steps" in line)
    assert lines[-1].startswith(f"all checkpoints: llmtrain eval {run} --suite {suite} --limit 6")


def test_over_time_everything_is_in_the_cache(
    runs: Runs, suite: str, quick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even on another machine, without the run's data and without its checkpoints."""
    run = shutil.copytree(runs.path("quick"), tmp_path / "quick")
    assert (run / "tokenizer/tokenizer_config.json").is_file()
    shutil.rmtree(run / "checkpoints")
    for name in ("run_task", "load_model"):
        monkeypatch.delattr(units, name)
    monkeypatch.delattr(units.texts, "evaluate_text")
    results = evaluate([run], suite, over_time=True, limit=6, data_dir=runs.folder)
    kept = [json.loads((run / f"eval/quick-step-{step:08d}.json").read_text()) for step in (6, 12)]
    assert [each["results"] for each in results] == [each["results"] for each in kept]
    assert (run / "eval/quick-over-time.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def failing(runs: Runs, suite: str) -> list[str]:
    """Write a suite whose only task reads a column that its data lacks, and return the overrides that select it."""
    task = (ROOT / "llmtrain/eval/tasks/piqa.yaml").read_text().replace("offline_piqa", "broken")
    (runs.folder / "tasks").mkdir()
    (runs.folder / "tasks/broken.yaml").write_text(task.replace("goal", "no_such_column"))
    shutil.copy(ROOT / "llmtrain/eval/tasks/local_jsonl.py", runs.folder / "tasks")
    (runs.folder / "bad.yaml").write_text("task_folders: [tasks]\ntasks: [{task: broken}]\n")
    return [f"eval.suite.name={runs.folder / 'bad.yaml'}", f"eval.suite.data_dir={runs.folder}"]


def test_a_failing_suite_does_not_touch_the_run(runs: Runs, failing: list[str]) -> None:
    code, output = train(runs, "failing", "checkpoint.every=null", *failing)
    assert code == 0, output
    failed = [line for line in output.splitlines() if "step 12/12 | bad: the evaluation failed (exit code 2)" in line]
    assert len(failed) == 1 and failed[0].endswith("bad-step-00000012.log"), output
    assert runs.exact("failing") == exact_lines(runs.reference(1, 1))


def test_a_suite_that_lacks_its_data_is_refused_before_anything_else(runs: Runs, suite: str) -> None:
    code, output = train(runs, "refused", f"eval.suite={{name: {suite}, data_dir: /nowhere}}")
    assert (code, output) == (
        2,
        "error: eval.suite.data_dir /nowhere is not a folder, so it has no piqa/validation.jsonl, which task offline_piqa "
        "reads; see eval/README.md\n",
    )
    assert not runs.path("refused").exists()


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_the_small_suites_tasks_from_local_files(
    runs: Runs, quick: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of Python's source and of TinyStories are evaluated as in eval/README.md, with few steps and documents."""
    text = [f"data.source={shared_data}/tinystories/valid.txt", "data.tokenizer=train:512"]
    code, output = train(runs, "stories", *text)
    assert code == 0, output
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    results = evaluate(
        [runs.path("quick"), runs.path("stories")],
        "offline",
        limit=12,
        data_dir=shared_data / "benchmarks",
        device="cpu",
    )
    small = {f"offline_{task.task}" for task in load_suite("small")[1].tasks}
    assert small <= set(results[0]["results"])
    rows = [line for line in capsys.readouterr().out.splitlines() if " acc " in line or " acc_norm " in line]
    called = 0
    for task in small | {"offline_arc_challenge", "offline_openbookqa", "offline_boolq"}:
        for result in results:
            assert math.isfinite(result["results"][task]["bits_per_byte"])
            called += is_called_what_it_is(result, task, next(row for row in rows if f" {task} " in row))
    assert called >= 8, "most scores of such small models should be near chance"


def is_called_what_it_is(result: dict[str, Any], task: str, row: str) -> bool:
    """Return whether an accuracy is near chance. Check that its row says so, with the standard error, and only then."""
    scores, chance = result["results"][task], result["tasks"][task].get("chance")
    metric = "acc_norm" if " acc_norm " in row else "acc"
    value, error = scores[metric], scores[f"{metric}_stderr"]
    shown = f"{value:.4f} ± {error:.4f}"
    if chance is None:
        assert f"{shown} " in row and "chance" not in row
        return False
    is_near = abs(value - chance) <= 2 * max(error, math.sqrt(chance * (1 - chance) / scores["n"]))
    assert (f"{shown} near chance" in row) == is_near, row
    return is_near
