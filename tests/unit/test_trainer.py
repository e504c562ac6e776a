"""What counts as training time around validations and checkpoints. A clock that only this test advances shows it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.sync_stats import SyncStats
from llmtrain.train.metrics import Metrics
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import Validation, ValidationSet

RECIPE = load_recipe(Path(__file__).parents[2] / "recipes/edit_llama_stdlib.yaml", ["eval.every=15", "log.every=10"])
LATE, WORK = 5.0, 100.0
"""Seconds: by which the slowest rank is late, and of a validation or checkpoint."""


class FakeTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr("llmtrain.turns.time", SimpleNamespace(monotonic=lambda: self.now))

    def pass_by(self, seconds: float, result: object = None) -> object:
        self.now += seconds
        return result


def trainer_at(step: int, time: FakeTime) -> Trainer:
    """On a rank that is at `step`, 5 steps after its last line."""
    all_ranks = SimpleNamespace(
        shares_memory=False,
        all_reduce=lambda tensor, what: time.pass_by(LATE, tensor),
        all_gather_object=lambda value, what: [value],
    )
    mesh = SimpleNamespace(all_ranks=all_ranks, device=torch.device("cpu"), is_main=True, virtual_seconds=0.0)
    method = SimpleNamespace(stats=SyncStats(), is_synchronized=False, validated_blocks=lambda: None)
    found = [(ValidationSet("", tuple, 1.0), Validation(3.0, 10))]
    validator = SimpleNamespace(run=lambda *asked: time.pass_by(WORK, (found, None)))
    nothing = SimpleNamespace(**dict.fromkeys(("wait", "poll", "check", "log_validation"), lambda *about: None))
    checkpointer = SimpleNamespace(**vars(nothing) | {"save": lambda *about: time.pass_by(WORK)})
    run_log = SimpleNamespace(**vars(nothing) | {"io_errors": nothing})
    metrics = Metrics(RECIPE, mesh, None, method, checkpointer, None, run_log, None)
    trainer = Trainer(RECIPE, None, method, None, metrics, validator, checkpointer, None)
    trainer.state.step = trainer.state.global_step = step
    metrics.interval.steps = 5
    return trainer


@pytest.mark.parametrize("work", [Trainer.validate, Trainer.save])
def test_what_the_slowest_rank_is_late_by_counts_before_work_that_does_not(
    monkeypatch: pytest.MonkeyPatch, work: object
) -> None:
    trainer = trainer_at(15, FakeTime(monkeypatch))
    work(trainer)
    stats = trainer.method.stats
    assert (trainer.metrics.train_seconds, stats.exposed_seconds, stats.wait_seconds) == (LATE, LATE, LATE)
