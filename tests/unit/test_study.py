"""Tests of the study's plan and records, with records of runs that were never made."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.errors import RecipeError
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.methods import METHODS
from llmtrain.train.run_dir import lock_folder
from tests import ROOT

sys.path.append(str(ROOT / "benchmarks" / "study"))
plan, stages, probes, runs, page, figures = map(
    importlib.import_module,
    ("study_plan", "study_stages", "study_probes", "study_runs", "study_page", "study_figures"),
)
MAIN = stages.STAGES["main"]
UNEVEN = stages.STAGES["uneven"]
DIVERGED = (
    "error: the norm of the gradient is inf on rank 0 (replica 0) at step 40 or in the 20 steps before it; start again"
)


def record(run: Any, loss: float | None) -> dict[str, Any]:
    numbers = {"bits_per_byte": 1.5, "rounds": 26, "bytes": 1e6 * len(run.cell.method), "steps": run.steps}
    numbers |= {"curve": [[0, 7.0, 0], [run.steps, loss or 7.0, 1]]}
    numbers |= {"tokens": run.steps * run.cell.batch * plan.LENGTH, "train_loss": 0.9 * (loss or 0.0)}
    made = {"commit": "abc", "torch": "2", "cpu": "fast"}
    found = {"error": DIVERGED} if loss is None else numbers
    return {"id": run.id, "loss": loss, "kind": run.kind, "keys": run.setting.overrides(), **found, **made}


def finished(cell: Any, loss_of: Callable[[Any], float | None]) -> tuple[list[Any], dict[str, Any]]:
    """Return all runs of a cell, in the order in which they can be made, and the records of these runs and of those that chose the
    cell's setting."""
    done: dict[str, Any] = {} if cell.tuned == cell else finished(cell.tuned, loss_of)[1]
    made: list[Any] = []
    while left := [run for run in stages.runs_of(cell, done) if run.id not in done]:
        for run in left:
            done[run.id] = record(run, loss_of(run))
        made += left
    return made, done


def likes(rate: float) -> Callable[[Any], float]:
    """Return a function that computes a run's loss. The loss is lowest at this learning rate or, with the third of a method's own
    settings, at twice this rate, where it is lower still. It falls with more tokens, and differs a little between seeds."""

    def loss(run: Any) -> float:
        own = plan.OUTER[run.cell.tuned.values]
        is_third = len(own) > 2 and set(own[2]) <= set(run.setting.own)
        far = abs(math.log(run.setting.lr / (2 * rate if is_third else rate)))
        missing = 0.0 if run.kind == "trial" else -math.log(run.share_of_tokens)
        return 3 + far - 0.8 * is_third + missing + run.number * 1e-4 * (run.kind != "trial")

    return loss


def test_each_method_of_the_study_has_a_cell() -> None:
    """SNOO is DiLoCo with one replica, and A-EDiT with even replicas is EDiT. Methods that are newer than the study's protocol
    have none."""
    of_one = {cell.method for cell in stages.STAGES["replicas"] if cell.replicas == 1} - {"synchronous", "diloco"}
    uneven = {cell.method for cell in UNEVEN}
    assert {cell.method for cell in MAIN} | of_one | uneven == plan.OUTER.keys() - {"qsr-power1"} <= METHODS.keys()


def test_cells_of_methods_that_depend_on_speeds_have_a_virtual_clock() -> None:
    cells = {
        cell.name: cell for stage in stages.STAGES.values() for cell in stage if cell.method in ("a_edit", "wagma")
    }
    assert [*cells] == [
        "wagma-m4-b64",
        *(f"{cell}-b64" for clock in ("half", "random") for cell in (f"a_edit-{clock}-m4-h30", f"wagma-{clock}-m4")),
        "a_edit-half-tinystories-m4-h30-b64",
    ]
    keys = plan.Run(
        cells["a_edit-random-m4-h30-b64"], "final", 11, plan.Setting(0.003, plan.ALWAYS["a_edit"])
    ).overrides()
    recipe = load_recipe(ROOT / runs.RECIPE, keys)
    assert (recipe.parallel.virtual_clock.step_seconds, recipe.parallel.virtual_clock.random_delay) == ((1, 1, 1, 1), 1)
    assert (recipe.sync.period.every, recipe.sync.period.min_steps) == (30, 60)
    stops = recipe.log.every, recipe.eval.every, recipe.checkpoint.every
    assert stops == (30, 120, 210), "an interrupted run stops at the end of a round"


@pytest.mark.parametrize("cell", [*MAIN, *UNEVEN], ids=[cell.label for cell in [*MAIN, *UNEVEN]])
def test_every_method_has_as_many_trials_and_three_seeds(cell: Any) -> None:
    made, _ = finished(cell, likes(0.0055))
    shorter = {"shorter": 6} if cell.method == "synchronous" else {}
    heat = {"heat": 18} if cell == MAIN[1] else {}
    assert Counter(run.kind for run in made) == {"trial": 12, "final": 3, **shorter, **heat}
    assert len({run.id for run in made}) == len(made)
    assert len({tuple(run.setting.overrides()) for run in made[:12]}) == 12, "no trial is made twice"
    assert [run.setting.lr for run in made[:3]] == [0.003, 0.006, 0.012]
    assert {run.setting.lr for run in made[3 : 3 + len(plan.OUTER[cell.method])]} <= {0.006}
    third = plan.OUTER[cell.method][2:3]
    final, best = made[12].setting, 2 * 0.0055 if third else 0.0055
    assert (
        all(run.setting == final for run in made[12:] if run.kind != "heat") and abs(math.log(final.lr / best)) < 0.15
    )
    assert all(key in final.own for key in third[0]) if third else set(final.own) <= {*plan.ALWAYS.get(cell.method, ())}
    tried = [run.setting.lr for run in made[:12] if run.setting.own == final.own]
    assert min(tried) < final.lr < max(tried), "the best rate is not at the end of those tried with the same keys"


@pytest.mark.parametrize(
    ("cell", "trial", "final", "warmup"),
    [
        (MAIN[1], 210, 780, 78),
        (plan.Cell("diloco", 8, 30, 96), 120, 510, 51),
        (plan.Cell("diloco", 1, 30, 32), 390, 1560, 156),
        (next(cell for cell in MAIN if cell.method == "palsgd"), 240, 990, 99),
    ],
    ids=["4", "8", "1", "palsgd"],
)
def test_runs_have_whole_rounds_and_trials_the_warmup_of_final_runs(
    cell: Any, trial: int, final: int, warmup: int
) -> None:
    made, _ = finished(cell, lambda run: 5.0 - 0.1 * (run.number == 0))
    assert (made[0].steps, made[12].steps) == (trial, final)
    assert all(f"schedule.warmup_steps={warmup}" in run.overrides() for run in (made[0], made[12]))


def test_shorter_synchronous_runs_say_what_fewer_tokens_cost() -> None:
    made, done = finished(MAIN[0], likes(0.006))
    shorter = [run for run in made if run.kind == "shorter"]
    assert [(run.share, run.number) for run in shorter] == [
        (share, seed) for share in (0.25, 0.5) for seed in (11, 12, 13)
    ]
    assert shorter[0].id == "synchronous-m4-b64-shorter25-11" and shorter[-1].steps == 390
    assert stages.pending(["main"], done)[0].cell == MAIN[1]


def test_the_heat_map_has_other_outer_steps_with_the_chosen_rate() -> None:
    made, _ = finished(MAIN[1], likes(0.006))
    heat = [run for run in made if run.kind == "heat"]
    assert {run.setting.lr for run in heat} == {made[12].setting.lr} and len({run.setting.own for run in heat}) == 18
    assert {run.steps for run in heat} == {780} and heat[0].id == "diloco-m4-h30-b64-heat-00"
    assert all("run.seed=11" in run.overrides() for run in heat)
    assert heat[-1].setting.own == plan.nesterov(1.0, 0.9, 4)


def test_longer_runs_have_trials_and_warmups_in_proportion() -> None:
    made, _ = finished(stages.STAGES["long"][0], likes(0.006))
    assert [(made[0].steps, "schedule.warmup_steps=312" in made[0].overrides()), made[12].steps] == [(780, True), 3120]
    assert made[12].id == "synchronous-x4-m4-b64-final-11" and made[-1].id == "synchronous-x4-m4-b64-shorter50-13"


def test_cells_with_the_rule_s_outer_step_have_the_chosen_inner_rate() -> None:
    for cell in stages.STAGES["auto"]:
        made, done = finished(cell, likes(0.0055))
        assert [run.id for run in made] == [f"{cell.name}-final-{seed}" for seed in (11, 12, 13)]
        [rate, *_] = done[f"{cell.tuned.name}-final-11"]["keys"]
        assert {(*run.setting.overrides(),) for run in made} == {(rate, "sync.outer=auto")}
        outer = load_recipe(ROOT / runs.RECIPE, made[0].overrides()).sync.outer
        assert outer.kind == "nesterov" and outer.momentum <= 0.9
    assert stages.total(["auto"]) == 27 and cell.name == "muloco-auto-m4-h30-b64"


def test_probes_are_single_runs_that_nothing_depends_on() -> None:
    made = {run.id: run for run in probes.PROBES}
    assert len(made) == len(probes.PROBES) == stages.total(["probes"])
    assert stages.pending(["probes"], {}) == list(probes.PROBES) and stages.pending(["main"], {})[-1].kind == "trial"
    for run in probes.PROBES:
        recipe = load_recipe(ROOT / runs.RECIPE, run.overrides())
        check(recipe, 1)
        is_short = "short" in run.kind
        assert (recipe.run.seed == 1) == is_short and (recipe.train.total_steps == 210) == is_short
    done = {run.id: record(run, 3.0) for run in probes.FIRST_PROBES[2:3]}
    [row] = page.probe_rows(done)
    assert row[:4] == ("diloco-m4-h30-b64-probe-best_of_heat-12", "12", "780", "3.0000")


def test_short_rounds_begin_with_less_momentum() -> None:
    made, _ = finished(plan.Cell("diloco", 4, 3, 64), likes(0.006))
    assert {run.setting.own for run in made[:3]} == {plan.nesterov(0.7, 0.5)}
    assert [run.setting.own for run in made[3:9]].count(plan.nesterov(0.7, 0.9)) == 1
    assert len({tuple(run.setting.overrides()) for run in made[:12]}) == 12


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.006: 4.0}, 0.012),
        ({0.006: 4.0, 0.012: 3.9}, 0.024),
        ({0.006: 4.0, 0.012: 4.1}, 0.003),
        ({0.003: 4.2, 0.006: 4.0, 0.012: 4.1}, 0.006 * 2**0.5),
        ({0.003: 4.05, 0.006: 4.0, 0.012: 4.1}, 0.006 / 2**0.5),
    ],
)
def test_the_next_learning_rate_is_beyond_the_best_or_beside_it(losses: dict[float, float], expected: float) -> None:
    assert plan.next_rate(losses) == pytest.approx(expected)


def test_a_run_that_failed_is_the_worst() -> None:
    made, _ = finished(plan.Cell("diloco", 4, 30, 64), lambda run: None if run.setting.lr < 0.007 else 5.0)
    assert made[3].setting.lr == 0.012 and made[12].setting.lr >= 0.012


def test_a_record_of_another_setting_is_refused() -> None:
    """A change of the plan leaves such records behind."""
    first = stages.pending(["main"], {})[:3]
    done = {run.id: record(run, 4.0) for run in first}
    done[first[1].id]["keys"] = ["optim.lr=0.5"]
    with pytest.raises(
        ValueError, match=f"the record of {first[1].id} is of optim.lr=0.5, the plan's run of optim.lr=0.006"
    ):
        stages.pending(["main"], done)


@pytest.mark.parametrize("stage", stages.STAGES)
def test_the_recipes_are_right(stage: str) -> None:
    for cell in stages.STAGES[stage]:
        made, _ = finished(cell, likes(0.0055))
        for run in (made[0], made[5], made[12]) if cell.tuned == cell else made[:1]:
            recipe = load_recipe(ROOT / runs.RECIPE, run.overrides())
            check(recipe, 1)
            assert recipe.sync.method == cell.method and recipe.parallel.replicas == cell.replicas
            assert recipe.optim.kind == (cell.inner or ("muon" if cell.method == "muloco" else "adamw"))
            assert recipe.train.global_batch == cell.batch and recipe.train.total_steps == run.steps
            tokens = cell.length * (plan.TOKENS if run.kind == "final" else plan.TOKENS / 4)
            assert recipe.data.max_tokens == cell.length * 7_000_000
            training = 1 - (recipe.sync.pull.probability if recipe.sync.pull is not None else 0.0)
            assert abs(run.steps - tokens / training / recipe.train.tokens_per_step) <= 15
            assert recipe.sync.warmup_steps == round(cell.together * run.steps)
            assert recipe.run.seed == (run.number if run.kind == "final" else 1)


def test_qsr_rounds_grow_with_the_learning_rate() -> None:
    rounds = plan.QsrRounds(20, 0.5)
    assert rounds.key(0.01) == "sync.period={kind: qsr, base: 20, alpha: 0.0223607}"
    rounds = plan.QsrRounds(20, 0.5, power=1)
    assert rounds.key(0.01) == "sync.period={kind: qsr, base: 20, alpha: 0.1, power: 1}"
    [cell] = stages.STAGES["power"]
    made, _ = finished(cell, likes(0.0055))
    assert made[-1].id == "qsr-power1-m4-b64-final-13"
    assert Counter(run.kind for run in made) == {"trial": 12, "final": 3}
    assert all("power: 1}" in run.overrides()[-1] for run in made), "the last key counts"


def test_runs_come_in_the_order_of_the_stages_and_none_twice() -> None:
    first = stages.pending(["main"], {})
    assert [run.id for run in first[:5]] == [
        *(f"synchronous-m4-b64-trial-0{number}" for number in range(3)),
        *(f"diloco-m4-h30-b64-trial-0{number}" for number in range(2)),
    ]
    done = {run.id: record(run, 3.0) for run in first[:1]}
    running = [SimpleNamespace(run=first[1])]
    assert runs.next_run(["main"], done, running).id == first[2].id
    assert stages.total(["main", "batch"]) == (15 + 4) * 15 + 2 * 6 + 18
    cells = list(dict.fromkeys(run.cell for run in stages.pending(list(stages.STAGES), {})))
    first = (
        "diloco-s8-m4-h30-b64",
        "synchronous-m8-b96",
        "diloco-m8-h30-b96",
        "diloco-m4-h3-b64",
        "synchronous-int8-m4-b64",
        MAIN[4].name,
    )
    assert [cell.name for cell in cells[:10]] == [*(cell.name for cell in MAIN[:4]), *first]


def test_a_finished_run_becomes_a_line(tmp_path: Path) -> None:
    run, folder = stages.pending(["main"], {})[3], tmp_path / "run"
    folder.mkdir()
    summary = {"final_eval_loss": 3.25, "final_train_loss": 3.5, "steps": 195, "tokens": 10, "sync_count": 6}
    summary |= {"bytes_sent": 900, "train_seconds": 7.5, "warnings": ["spike"], "texts": {"python": {"eval_loss": 3.5}}}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"step": 0, "eval/loss": 7.0, "eval/bpb": 3.0},
        {"step": 100, "comm/bytes_total": 500.0, "sync/divergence": 0.5, "sync/anomalies": 1},
        {"step": 195, "comm/bytes_total": 900.0, "sync/divergence": 0.25},
        {"step": 195, "eval/loss": 3.25, "eval/bpb": 1.42},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    line = runs.record_of(run, folder, "abc")
    assert (line["method"], line["replicas"], line["every"], line["batch"]) == ("diloco", 4, 30, 64)
    assert (line["loss"], line["bits_per_byte"], line["bytes"], line["warnings"]) == (3.25, 1.42, 900, 1)
    assert line["loss_by_text"] == {"python": 3.5}
    assert line["curve"] == [[0, 7.0, 0], [195, 3.25, 900]] and line["keys"] == ["optim.lr=0.003"]
    assert line["diagnostics"] == {"sync/divergence": 0.25, "sync/anomalies": 1} and "virtual_seconds" not in line
    path = tmp_path / "results" / "runs.jsonl"
    failed = runs.record_of(run, folder, "abc", "error: the loss is nan")
    for one in (line, {**failed, "id": "other"}):
        runs.append(one, path)
    assert runs.read_records(path) == {run.id: line, "other": {**failed, "id": "other"}}
    assert plan.loss_of(failed) == math.inf


def test_a_record_has_the_commit_with_which_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, f"echo '{DIVERGED}'; exit 1")
    job = runs.Job(stages.pending(["main"], {})[0], min(os.sched_getaffinity(0)))
    monkeypatch.setenv("LLMTRAIN_COMMIT", "later")
    job.process.wait(60)
    assert job.end(False)["commit"] == "abc"


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
    job = runs.Job(stages.pending(["main"], {})[0], min(os.sched_getaffinity(0)))
    job.process.wait(60)
    record = job.end(False)
    assert (record["loss"], record["error"]) == (None, line) and job.log.exists()


@pytest.mark.parametrize("ending", ["echo 'error: no space left'; exit 1", f"echo '{DIVERGED}'; exit 2", "kill -9 $$"])
def test_a_run_that_failed_is_no_record_and_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    """Two other runs are in progress, and stop with a checkpoint."""
    script = f"case \"$*\" in *trial-00*) {ending};; esac\ntrap 'exit 3' TERM\nwhile :; do sleep 0.02; done"
    records = commands(tmp_path, monkeypatch, script)
    first = stages.pending(["main"], {})
    (tmp_path / first[0].id).mkdir()
    assert runs.make_runs(["main"], 3, 0.1) == 1
    assert not records and (tmp_path / first[0].id).is_dir()
    assert sorted(path.stem for path in tmp_path.glob("*.log")) == [run.id for run in first[:3]]
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {first[0].id} failed with exit code") and "start the same command again" in error


def test_two_processes_do_not_make_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    monkeypatch.setattr("llmtrain.train.run_dir.PATIENCE_SECONDS", 0.0)
    lock = lock_folder(tmp_path, "stop it")
    with pytest.raises(RecipeError, match=r"works in .* wait until it has ended, or stop it"):
        runs.make_runs(["main"], 1, 1.0)
    lock.release()
