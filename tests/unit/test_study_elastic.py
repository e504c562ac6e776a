"""Tests of the study's elastic runs and benchmarks, with records of runs that were never made."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.errors import ResultsError, TrainingError
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_study import ROOT, finished, likes, runs, stages

elastic, benchmarks = map(importlib.import_module, ("study_elastic", "study_benchmarks"))


@pytest.fixture(scope="module")
def done() -> dict[str, Any]:
    """Provide the records of all cells whose trials chose the settings of elastic runs."""
    cells = {cell.tuned for cell in stages.STAGES["text"]}
    return {name: one for cell in cells for name, one in finished(cell, likes(0.0055))[1].items()}


def test_each_replica_brings_its_part_of_the_batch(done: dict[str, Any]) -> None:
    made = list(elastic.elastic_runs(done))
    assert len(made) == len({run.id for run in made}) == 12
    edit = next(run for run in made if run.id == "elastic-edit-joining-12")
    recipes = [load_recipe(ROOT / runs.RECIPE, edit.overrides(replicas)) for replicas in elastic.ORDERS["joining"]]
    assert [recipe.train.global_batch for recipe in recipes] == [16, 32, 64, 128]
    for recipe in recipes:
        check(recipe, 1)
        assert (recipe.sync.method, recipe.train.total_steps, recipe.run.seed) == ("edit", 720, 12)
    assert {(*run.keys,) for run in made if run.method == "edit"} == {edit.keys}
    assert edit.keys[1:] == (*done["edit-m4-h30-b64-final-11"]["keys"],)


SCRIPT = """#!{python}
import json, pathlib, signal, sys, time
keys = dict(one.split("=", 1) for one in sys.argv[5:])
folder = pathlib.Path(keys["run.out_dir"]) / keys["run.name"]
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
step = max([0, *(int(path.name[-8:]) for path in (folder / "checkpoints").iterdir())])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
def save():
    (folder / f"checkpoints/step-{{step:08}}").mkdir()
    (folder / f"checkpoints/step-{{step:08}}/state.json").touch()
while step < 12 and not stop:
    step += 1
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(dict(step=step, replicas=keys["parallel.replicas"])) + "\\n")
    while step % 3 == 2 and step < 11 and not stop:
        time.sleep(0.005)
step += bool(stop)
{fault}
save()
sys.exit(3 if stop else 0)
"""


@pytest.mark.parametrize("fault", ["", "sys.exit(1 if step > 3 else 3 if save() else 3)"])
def test_a_run_is_stopped_and_continued_at_the_end_of_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: dict[str, Any], fault: str
) -> None:
    python = tmp_path / "python"
    python.write_text(SCRIPT.format(python=sys.executable, fault=fault))
    python.chmod(0o755)
    monkeypatch.setattr(elastic, "sys", SimpleNamespace(executable=str(python)))
    changed = {"FOLDER": tmp_path, "STAGE_STEPS": 3, "LOG_STEPS": 1, "POLL_SECONDS": 0.005}
    for name, value in changed.items():
        monkeypatch.setattr(elastic, name, value)
    run = next(elastic.elastic_runs(done))
    if fault:
        with pytest.raises(TrainingError, match=r"ended with code 1 after step 3, 6 expected"):
            run.make(0)
        return
    run.make(0)
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], int(line["replicas"])) for line in lines] == [
        *((1, 1), (2, 1), (4, 2), (5, 2), (7, 4), (8, 4)),
        *((10, 8), (11, 8), (12, 8)),
    ]
    assert run.steps_done == 12


def test_the_table_of_elastic_runs_waits_for_all_of_them(done: dict[str, Any]) -> None:
    records = {}
    for run in elastic.elastic_runs(done):
        assert elastic.elastic_rows(records) == []
        loss = 3.0 + 0.3 * (run.method == "edit") + 0.01 * run.seed
        made = {"method": run.method, "order": run.order, "loss": loss, "bytes": 2e6}
        records[run.id] = made | {"after_stages": [loss + 3, loss + 2, loss + 1, loss]}
    joining, edit, leaving, _ = elastic.elastic_rows(records)
    assert joining == ("1 → 2 → 4 → 8", "synchronous", "6.120", "5.120", "4.120", "3.120", "0.010", "", "2 MB")
    assert edit[-3:] == ("0.010", "+9.6%", "2 MB") and leaving[0] == "8 → 4 → 2 → 1"


def test_models_are_tested_against_synchronous_ones_of_their_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []

    def run(command: list[str], **keys: Any) -> SimpleNamespace:
        commands.append(command[4:])
        folder = Path(command[4]) / "eval"
        folder.mkdir(parents=True)
        score = 0.1 * len(commands)
        result = {"shown": [["blimp", "acc"]], "results": {"blimp": {"acc": score, "n": 9}}, "tasks": {"blimp": {}}}
        test = {"task": "blimp", "metric": "acc", "difference": 0.1, "p": 0.01}
        against = {"against": {"scores": [test]}} if "--baseline" in command else {}
        (folder / "benchmarks.json").write_text(json.dumps(result | against | {"written": "much"}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(benchmarks, "RUNS", tmp_path)
    monkeypatch.setattr(benchmarks, "subprocess", SimpleNamespace(run=run))
    cells, records = stages.STAGES["text"], {}
    done = {name: one for cell in cells for name, one in finished(cell, likes(0.0055))[1].items()}
    for label in benchmarks.MODELS:
        for seed in (11, 12, 13):
            assert benchmarks.benchmark_rows(records, done) == ((), [])
            made = benchmarks.evaluate(label, seed, tmp_path)
            records[made["id"]] = made
    assert "--baseline" not in commands[0]
    assert commands[3][-2:] == ["--baseline", str(tmp_path / f"{cells[0].name}-final-11")]
    columns, rows = benchmarks.benchmark_rows(records, done)
    assert (
        columns[4:6] == ("synchronous (baseline)", "synchronous, half of the tokens") and columns[-1] == "a_edit-half"
    )
    assert rows[0][4] == "1.500 (1.500 to 1.500)" and rows[1][:3] == ("blimp", "acc", "9")
    assert rows[1][4:6] == ("0.200 (0.100 to 0.300)", "0.500 better in 3 of 3 (0.400 to 0.600)")
    monkeypatch.setattr(benchmarks, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=2)))
    with pytest.raises(ResultsError, match=r"could not be evaluated \(exit code 2\)"):
        benchmarks.evaluate("synchronous", 11, tmp_path)
