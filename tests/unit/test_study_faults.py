"""Tests of the study's runs in which a replica has a fault."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from tests.unit.test_study import ROOT, record, runs, stages

faults, faulty_run = map(importlib.import_module, ("study_faults", "faulty_run"))


def trainer_of(replica: int) -> Any:
    """Return a replica's trainer of one linear layer, with the parts that a fault changes."""
    model = nn.Linear(2, 2, bias=False)
    blocks = [SimpleNamespace(shards=[torch.ones(3)]) for _ in range(3)]
    engine = SimpleNamespace(blocks=blocks, model=model, step=lambda lr: lr)
    mesh = SimpleNamespace(replica_comms=SimpleNamespace(rank=replica))
    return SimpleNamespace(
        engine=engine,
        state=SimpleNamespace(step=1),
        after_step=[],
        loader=SimpleNamespace(next=lambda: [torch.full((2, 5), 7)]),
        checkpointer=SimpleNamespace(mesh=mesh),
        recipe=SimpleNamespace(run=SimpleNamespace(seed=11)),
    )


def seen(trainer: Any, step: int) -> tuple[float, float, bool, float]:
    """Return (largest weight of a block, factor of the rate, whether tokens are garbage, largest gradient) at the end of a step."""
    trainer.state.step = step
    for call in trainer.after_step:
        call(step)
    trainer.engine.model.zero_grad()
    trainer.engine.model(torch.ones(2)).sum().backward()
    weight = max(float(block.shards[0].max()) for block in trainer.engine.blocks)
    is_garbage = not bool((trainer.loader.next()[0] == 7).all())
    return weight, trainer.engine.step(1.0), is_garbage, float(trainer.engine.model.weight.grad.max())


@pytest.mark.parametrize(
    ("fault", "during", "later"),
    [
        ("bits", (65536, 1, False, 1), (65536, 1, False, 1)),
        ("rate", (1, 10, False, 1), (1, 1, False, 1)),
        ("documents", (1, 1, True, 1), (1, 1, False, 1)),
        ("gradients", (1, 1, False, 1000), (1, 1, False, 1)),
    ],
)
def test_one_replica_has_a_fault_for_four_rounds(fault: str, during: tuple, later: tuple) -> None:
    normal = (1, 1, False, 1)
    for replica in range(4):
        trainer = trainer_of(replica)
        faulty_run.inject(trainer, fault)
        assert seen(trainer, 300) == normal
        is_faulty = replica == 3
        assert [seen(trainer, step) for step in (301, 340)] == 2 * [during if is_faulty else normal]
        assert seen(trainer, 341) == (later if is_faulty else normal)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="the fault is 'heat', expected one of bits"):
        faulty_run.inject(trainer_of(3), "heat")


def test_runs_with_faults_differ_in_the_penalty_alone() -> None:
    made = faults.FAULT_RUNS
    assert len({run.id for run in made}) == len(made) == stages.total(["faults"]) == 20
    assert stages.pending(["faults"], {}) == list(made) and {run.fault for run in made} == {"", *faulty_run.FAULTS}
    for run in made:
        recipe = load_recipe(ROOT / runs.RECIPE, run.overrides())
        check(recipe, 1)
        assert recipe.train.total_steps == 600 and recipe.sync.period.every == 10
        assert (recipe.sync.reduction.kind == "mean") == run.kind.endswith("mean")
        assert recipe.optim.lr == (0.012 if "all_rates" in run.kind else 0.003)
    assert (faulty_run.FIRST - 1) % 10 == faulty_run.LAST % 10 == 0


def test_the_table_compares_with_the_whole_penalty_without_a_fault() -> None:
    done = {run.id: record(run, 3.5 if "bits" in run.kind else 3.25) for run in faults.FAULT_RUNS[:3]}
    done[faults.FAULT_RUNS[2].id]["diagnostics"] = {"sync/anomalies": 1.0}
    done[faults.FAULT_RUNS[1].id]["diagnostics"] = {}
    done[faults.FAULT_RUNS[0].id]["diagnostics"] = {"sync/anomalies": 0.0}
    diverged = faults.FAULT_RUNS[7]
    rows = faults.fault_rows({**done, diverged.id: record(diverged, None)})
    assert rows == [
        ("clean", "whole", "3.2500", "+0.0000", "0"),
        ("clean", "mean", "3.2500", "+0.0000", "0"),
        ("bits", "whole", "3.5000", "+0.2500", "1"),
        ("bits", "mean", "diverged", "", ""),
    ]
    assert faults.fault_rows({}) == []
