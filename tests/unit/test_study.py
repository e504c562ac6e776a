"""The study's plan, records and page, of runs that were never made."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.methods import METHODS
from tests.unit.test_benchmarks import ROOT

sys.path.append(str(ROOT / "benchmarks" / "study"))
plan, runs, page = map(importlib.import_module, ("study_plan", "study_runs", "study_page"))
MAIN = plan.STAGES["main"]
TIMED = {"a_edit", "wagma"}
DIVERGED = (
    "error: the norm of the gradient is inf on rank 0 (replica 0) at step 40 or in the 20 steps before it; start again"
)


def record(run: Any, loss: float | None) -> dict[str, Any]:
    numbers = {"bits_per_byte": 1.5, "rounds": 26, "bytes": 1e6 * len(run.cell.method), "steps": run.steps}
    made = {"commit": "abc", "torch": "2", "cpu": "fast"}
    found = {"error": DIVERGED} if loss is None else numbers
    return {"id": run.id, "loss": loss, "kind": run.kind, "keys": run.setting.overrides(), **found, **made}


def finished(cell: Any, loss_of: Callable[[Any], float | None]) -> tuple[list[Any], dict[str, Any]]:
    """All runs of a cell, made in the order in which they can be, and their records."""
    done: dict[str, Any] = {}
    made: list[Any] = []
    while left := [run for run in plan.runs_of(cell, done) if run.id not in done]:
        for run in left:
            done[run.id] = record(run, loss_of(run))
        made += left
    return made, done


def likes(rate: float) -> Callable[[Any], float]:
    """A loss that is lowest at this learning rate, with the third of a method's own settings, and with every seed a little
    different."""

    def loss(run: Any) -> float:
        own = plan.OUTER[run.cell.method]
        is_third = len(own) > 2 and set(own[2]) <= set(run.setting.own)
        return 3 + abs(math.log(run.setting.lr / rate)) - 0.5 * is_third + run.number * 1e-4 * (run.kind == "final")

    return loss


def test_all_methods_but_those_of_uneven_replicas_are_studied() -> None:
    of_one = {cell.method for cell in plan.STAGES["replicas"] if cell.replicas == 1} - {"synchronous", "diloco"}
    assert {cell.method for cell in MAIN} | of_one == METHODS.keys() - TIMED - {"snoo"} == plan.OUTER.keys()


@pytest.mark.parametrize("cell", MAIN, ids=[cell.label for cell in MAIN])
def test_every_method_has_as_many_trials_and_three_seeds(cell: Any) -> None:
    made, _ = finished(cell, likes(0.0026))
    assert Counter(run.kind for run in made) == {"trial": 12, "final": 3}
    assert len({run.id for run in made}) == 15
    assert len({tuple(run.setting.overrides()) for run in made[:12]}) == 12, "no trial is made twice"
    assert [run.setting.lr for run in made[:4]] == [0.001, 0.002, 0.004, 0.008]
    assert {run.setting.lr for run in made[4 : 4 + len(plan.OUTER[cell.method])]} <= {0.002}
    final = made[12].setting
    assert all(run.setting == final for run in made[12:]) and abs(math.log(final.lr / 0.0026)) < 0.25
    assert {run.steps for run in made[:12]} == {195} and {run.steps for run in made[12:]} == {781}
    third = plan.OUTER[cell.method][2:3]
    assert all(key in final.own for key in third[0]) if third else final.own == ()


def test_short_rounds_begin_with_less_momentum() -> None:
    made, _ = finished(plan.Cell("diloco", 4, 3, 64), likes(0.0026))
    assert {run.setting.own for run in made[:4]} == {plan.nesterov(0.7, 0.5)}
    assert [run.setting.own for run in made[4:10]].count(plan.nesterov(0.7, 0.9)) == 1
    assert len({tuple(run.setting.overrides()) for run in made[:12]}) == 12


@pytest.mark.parametrize(("rate", "expected"), [(0.1, 0.016), (0.0001, 0.0005)])
def test_trials_go_beyond_the_ends(rate: float, expected: float) -> None:
    made, _ = finished(plan.Cell("diloco", 4, 30, 64), likes(rate))
    assert made[12].setting.lr == pytest.approx(expected)


def test_a_run_that_failed_is_the_worst() -> None:
    made, _ = finished(plan.Cell("diloco", 4, 30, 64), lambda run: None if run.setting.lr < 0.007 else 5.0)
    assert made[4].setting.lr == 0.008 and made[12].setting.lr >= 0.008


@pytest.mark.parametrize("stage", plan.STAGES)
def test_the_recipes_are_right(stage: str) -> None:
    for cell in plan.STAGES[stage]:
        made, _ = finished(cell, likes(0.0026))
        for run in (made[0], made[5], made[12]):
            recipe = load_recipe(ROOT / runs.RECIPE, run.overrides())
            check(recipe, 1)
            assert recipe.sync.method == cell.method and recipe.parallel.replicas == cell.replicas
            assert recipe.optim.kind == (cell.inner or ("muon" if cell.method == "muloco" else "adamw"))
            assert recipe.train.global_batch == cell.batch and recipe.train.total_steps == run.steps
            tokens = plan.TOKENS if run.kind == "final" else plan.TOKENS / 4
            assert run.steps * recipe.train.tokens_per_step == pytest.approx(tokens, rel=0.01)
            assert recipe.sync.warmup_steps == round(cell.together * run.steps)
            assert recipe.run.seed == (run.number if run.kind == "final" else 1)


def test_qsr_rounds_grow_with_the_learning_rate() -> None:
    rounds = plan.QsrRounds(20, 0.5)
    assert rounds.key(0.01) == "sync.period={kind: qsr, base: 20, alpha: 0.0223607}"


def test_runs_come_in_the_order_of_the_stages_and_none_twice(capsys: pytest.CaptureFixture[str]) -> None:
    first = plan.pending(["main"], {})
    assert [run.id for run in first[:5]] == [
        *(f"synchronous-m4-b64-trial-0{number}" for number in range(4)),
        "diloco-m4-h30-b64-trial-00",
    ]
    done = {run.id: record(run, 3.0) for run in first[:1]}
    running = [SimpleNamespace(run=first[1])]
    assert runs.next_run(["main"], done, running).id == first[2].id
    assert plan.total(["main", "batch"]) == (14 + 4) * 15
    cells = list(dict.fromkeys(run.cell for run in plan.pending(list(plan.STAGES), {})))
    first = ("diloco-m4-h3-b64", *(f"{name}-s8-m4-h30-b64" for name in ("diloco", "local_sgd", "edit")))
    then = ("local_sgd-m4-h3-b64", "diloco-m4-h10-b64", "local_sgd-m4-h10-b64", MAIN[4].name)
    assert [cell.name for cell in cells[:12]] == [*(cell.name for cell in MAIN[:4]), *first, *then]


def test_a_finished_run_becomes_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = plan.pending(["main"], {})[4], tmp_path / "run"
    folder.mkdir()
    summary = {"final_eval_loss": 3.25, "final_train_loss": 3.5, "steps": 195, "tokens": 10, "sync_count": 6}
    summary |= {"bytes_sent": 900, "train_seconds": 7.5, "warnings": ["spike"]}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"step": 0, "eval/loss": 7.0, "eval/bpb": 3.0},
        {"step": 100, "comm/bytes_total": 500.0},
        {"step": 195, "comm/bytes_total": 900.0},
        {"step": 195, "eval/loss": 3.25, "eval/bpb": 1.42},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = runs.record_of(run, folder)
    assert (line["method"], line["replicas"], line["every"], line["batch"]) == ("diloco", 4, 30, 64)
    assert (line["loss"], line["bits_per_byte"], line["bytes"], line["warnings"]) == (3.25, 1.42, 900, 1)
    assert line["curve"] == [[0, 7.0, 0], [195, 3.25, 900]] and line["keys"] == ["optim.lr=0.001"]
    path = tmp_path / "results" / "runs.jsonl"
    failed = runs.record_of(run, folder, "error: the loss is nan")
    for one in (line, {**failed, "id": "other"}):
        runs.append(one, path)
    assert runs.read_records(path) == {run.id: line, "other": {**failed, "id": "other"}}
    assert plan.loss_of(failed) == math.inf


def test_the_page_compares_with_synchronous_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: dict[str, Any] = {}
    for stage in ("main", "replicas"):
        for cell in plan.STAGES[stage][:2]:
            done |= finished(cell, likes(0.0026))[1]
    partly, _ = finished(MAIN[2], likes(0.0026))
    done |= {run.id: record(run, 4.0 - 0.1 * run.number) for run in partly[:3]}
    synchronous, diloco, averaged = (page.row_of(cell, done) for cell in MAIN[:3])
    assert page.row_of(MAIN[3], done) is None
    assert synchronous[4] == "" and float(synchronous[2]) > 3
    gap = float(diloco[2]) / float(synchronous[2]) - 1
    assert float(diloco[4].rstrip("%")) == pytest.approx(100 * gap, abs=0.1) and gap < 0 and diloco[3] == "0.0001"
    assert (
        diloco[8] == "optim.lr=0.00282843 outer={kind: nesterov, lr: 0.4, momentum: 0.9, rounds: {momentum_warmup: 0}}"
    )
    assert averaged[1] == "3.8000 (3 of 12)" and averaged[2] == ""
    assert [row[0] for row in page.formula_rows(done)] == ["4", "8"]
    assert page.formula_rows(done)[0][2] == "+3.7%", "what the protocol says"

    monkeypatch.setattr(page, "RECORDS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(page, "read_records", lambda: done)
    options = Namespace(write=False)
    monkeypatch.setattr(page, "parser", lambda text: SimpleNamespace(parse_args=lambda: options))
    page.main()
    assert "Gap against" not in capsys.readouterr().out and not list(tmp_path.iterdir()), "there is one row"
    done |= finished(plan.STAGES["rounds"][0], likes(0.0026))[1]
    options.write = True
    page.main()
    written = (tmp_path / "README.md").read_text()
    assert "| replicas | DiLoCo to synchronous | published fit |" in written
    assert "## Gap against the number of rounds\n\n| method | H |" in written
    assert written.count("## ") == 5 and (tmp_path / "losses.png").stat().st_size > 5_000


@pytest.mark.parametrize(("seeds", "words"), [({12}, "1 of 3 diverged"), ({11, 12, 13}, "3 of 3 diverged")])
def test_the_page_shows_how_many_seeds_diverged(tmp_path: Path, seeds: set[int], words: str) -> None:
    usual = likes(0.0026)
    done = finished(MAIN[0], usual)[1]
    page.draw(done, tmp_path / "without.png")
    done |= finished(MAIN[1], lambda run: None if run.number in seeds and run.kind == "final" else usual(run))[1]
    row = page.row_of(MAIN[1], done)
    assert row[2:8] == (words, *[""] * 5) and row[8].startswith("optim.lr=") and len(row) == len(page.COLUMNS)
    assert page.formula_rows(done) == []
    page.draw(done, tmp_path / "with.png")
    assert (tmp_path / "with.png").read_bytes() == (tmp_path / "without.png").read_bytes()
    del done[f"{MAIN[1].name}-final-13"]
    assert page.row_of(MAIN[1], done)[2:8] == ("",) * 6, "not complete"


def test_gaps_are_listed_by_method_and_rounds() -> None:
    """And only of cells whose final runs are done."""
    usual, done = likes(0.0026), finished(MAIN[0], likes(0.0026))[1]
    cells = [MAIN[3], *plan.STAGES["together"][:2], *plan.STAGES["rounds"][:3], MAIN[1], *plan.STAGES["batch"]]
    for cell in cells:
        is_bad = cell.method == "edit"
        done |= finished(cell, lambda run, bad=is_bad: None if bad and run.number == 13 else usual(run))[1]
        of_cell = [record for name, record in done.items() if name.startswith(f"{cell.name}-final") and record["loss"]]
        for record in of_cell:
            record["rounds"] = round(781 * (1 - cell.together)) // cell.every
    assert len(page.rounds_rows(done)) == 7
    del done[f"{plan.STAGES['rounds'][1].name}-final-12"]
    rows = page.rounds_rows(done)
    assert [row[:4] for row in rows] == [
        ("diloco-s8", "30", "8%", "23"),
        ("diloco", "30", "0%", "26"),
        ("diloco", "10", "0%", "78"),
        ("diloco", "3", "0%", "260"),
        ("local_sgd-s8", "30", "8%", "23"),
        ("edit", "30", "0%", ""),
    ]
    assert rows[1][4:] == tuple(page.row_of(MAIN[1], done)[column] for column in (2, 3, 4, 7))
    assert rows[-1][4:] == ("1 of 3 diverged", "", "", "")


def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> list[dict[str, Any]]:
    """Let a shell script stand in for all training runs. Return the list to which records are appended."""
    python, records = tmp_path / "python", []
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setenv("LLMTRAIN_COMMIT", "abc")
    monkeypatch.setattr(runs, "sys", SimpleNamespace(executable=str(python), stderr=sys.stderr))
    monkeypatch.setattr(runs, "signal", SimpleNamespace(**vars(signal) | {"signal": lambda *_: None}))
    for name, value in {"RUNS": tmp_path, "POLL_SECONDS": 0.01, "read_records": dict, "append": records.append}.items():
        monkeypatch.setattr(runs, name, value)
    return records


@pytest.mark.parametrize(
    "line", [DIVERGED, "error: replica 1: layers.0 excluded 9 rounds (sync.reduction.max_exclusions)"]
)
def test_a_run_that_diverged_is_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    commands(tmp_path, monkeypatch, f"echo '{line}'; echo 'see the log'; exit 1")
    job = runs.Job(plan.pending(["main"], {})[0], min(os.sched_getaffinity(0)))
    job.process.wait(10)
    record = job.end(False)
    assert (record["loss"], record["error"]) == (None, line) and job.log.exists()


@pytest.mark.parametrize("ending", ["echo 'error: no space left'; exit 1", f"echo '{DIVERGED}'; exit 2", "kill -9 $$"])
def test_a_run_that_failed_is_no_record_and_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    """Two others are in progress, and stop with a checkpoint."""
    script = f"case \"$*\" in *trial-00*) {ending};; esac\ntrap 'exit 3' TERM\nwhile :; do sleep 0.02; done"
    records = commands(tmp_path, monkeypatch, script)
    first = plan.pending(["main"], {})
    (tmp_path / first[0].id).mkdir()
    assert runs.make_runs(["main"], 3, 0.002) == 1
    assert not records and (tmp_path / first[0].id).is_dir()
    assert sorted(path.stem for path in tmp_path.glob("*.log")) == [run.id for run in first[:3]]
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {first[0].id} failed with exit code") and "start the same command again" in error
