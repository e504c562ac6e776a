"""Tests of training time around validations and checkpoints, by a clock that only these tests advance."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.schedules.overlapped import OverlappedSchedule
from llmtrain.sync.sync_stats import SyncStats
from llmtrain.train.metric_gather import IntervalMetrics
from llmtrain.train.metrics import Metrics
from llmtrain.train.state import TrainState
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import Validation, ValidationSet

RECIPE = load_recipe(Path(__file__).parents[2] / "recipes/edit_llama_stdlib.yaml", ["eval.every=15", "log.every=10"])
LATE, IN_FLIGHT, WORK = 5.0, 3.0, 100.0
"""Seconds by which the slowest rank is late, until a message arrives, and that a validation or checkpoint takes."""


class FakeTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr("llmtrain.turns.time", SimpleNamespace(monotonic=lambda: self.now))

    def pass_by(self, seconds: float, result: object = None) -> object:
        self.now += seconds
        return result


def trainer_at(step: int, time: FakeTime) -> Trainer:
    """Return the trainer of a rank at `step`, 5 steps after its last line of metrics."""

    def log(state: TrainState, lr: float) -> None:
        metrics.interval = IntervalMetrics()
        metrics._gather.wait = lambda: time.pass_by(LATE)

    all_ranks = SimpleNamespace(shares_memory=False, all_reduce=lambda tensor, what: time.pass_by(LATE, tensor))
    mesh = SimpleNamespace(all_ranks=all_ranks, device=torch.device("cpu"), is_main=True, virtual_seconds=0.0)
    schedule = OverlappedSchedule.__new__(OverlappedSchedule)
    schedule.block_sync = SimpleNamespace(stats=SyncStats(), wait_for_device=lambda: None)
    schedule._messages = [None, SimpleNamespace(wait=lambda: time.pass_by(IN_FLIGHT))]
    method = SimpleNamespace(stats=schedule.block_sync.stats, is_synchronized=False, validated_blocks=lambda: None)
    method.wait_for_messages = schedule.wait_for_messages
    found = [(ValidationSet("", tuple, 1.0), Validation(3.0, 10))]
    validator = SimpleNamespace(run=lambda *asked: time.pass_by(WORK, (found, None)))
    nothing = SimpleNamespace(**dict.fromkeys(("wait", "poll", "check", "log_validation"), lambda *about: None))
    checkpointer = SimpleNamespace(**vars(nothing) | {"save": lambda *about: time.pass_by(WORK)})
    run_log = SimpleNamespace(**vars(nothing) | {"io_errors": nothing})
    metrics = Metrics(RECIPE, mesh, None, method, checkpointer, None, run_log, None)
    trainer = Trainer(RECIPE, None, method, None, metrics, validator, checkpointer, None)
    trainer.state.step = trainer.state.global_step = step
    metrics.interval.steps, metrics.log = 5, log
    return trainer


@pytest.mark.parametrize("work", [Trainer.validate, Trainer.save])
def test_what_late_ranks_and_messages_take_counts_before_work_that_does_not(
    monkeypatch: pytest.MonkeyPatch, work: object
) -> None:
    trainer = trainer_at(15, FakeTime(monkeypatch))
    work(trainer)
    stats = trainer.method.stats
    counted = trainer.metrics.train_seconds, stats.exposed_seconds, stats.wait_seconds
    assert counted == (LATE + IN_FLIGHT, LATE + IN_FLIGHT, LATE)
