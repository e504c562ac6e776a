"""Tests of numbers that stay on the device until the host needs them, and of steps that are skipped without asking the host."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from llmtrain.config import OptimSection
from llmtrain.parallel.optimizers import OptimizerSet, build_optimizer, start_moments, step_unless
from llmtrain.train.metric_gather import AsyncMetricGather, DeviceNumbers, LogLine
from llmtrain.train.state import TrainState, host_numbers


def test_a_cpus_numbers_is_ready_at_once() -> None:
    numbers = DeviceNumbers({"known": 2, "scalar": torch.tensor(1 / 3, dtype=torch.float64)})
    assert numbers.is_ready and numbers.read() == {"known": 2, "scalar": 1 / 3}
    assert host_numbers({"count": torch.tensor(3.0)}) == {"count": 3.0}


def test_time_after_a_line_was_opened_is_time_of_its_steps() -> None:
    numbers = DeviceNumbers({"steps": 1.0, "step_seconds": 1.0})
    line = LogLine(step=4, seconds=9.0, common={}, numbers=numbers, more_step_seconds=0.5)
    assert line.row({"wait_seconds": 3.0}) == {"steps": 1.0, "step_seconds": 1.5, "wait_seconds": 3.0}


def test_numbers_are_gathered_in_one_order_whichever_a_gpu_computes() -> None:
    """Numbers that a GPU computes come last in a row, and ranks may differ in which numbers these are."""
    sent: list[torch.Tensor] = []

    def start_all_gather(values: torch.Tensor, what: str) -> SimpleNamespace:
        sent.append(values)
        return SimpleNamespace(wait=lambda: torch.stack(sent))

    mesh = SimpleNamespace(all_ranks=SimpleNamespace(start_all_gather=start_all_gather))
    rows = {"steps": 2, "step_seconds": 0.5, "stop": True}, {"stop": False, "step_seconds": 0.25, "steps": 3}
    for row in rows:
        gather = AsyncMetricGather(mesh)
        gather.submit(LogLine(4, 9.0, {"train/lr": 0.1}, DeviceNumbers(row)), {"wait_seconds": 3.0})
    line = gather.collect()
    assert (line.step, line.seconds, line.common) == (4, 9.0, {"train/lr": 0.1}) and gather.collect() is None
    found = {name: column.tolist() for name, column in line.columns.items()}
    assert found == {"steps": [2, 3], "step_seconds": [0.5, 0.25], "stop": [1, 0], "wait_seconds": [3, 3]}


def test_skipped_steps_are_counted_by_number_or_by_scalar() -> None:
    for kind in (int, torch.tensor):
        state = TrainState(10)
        for skipped in (0, 1, 1):
            state.count_gradient(5, kind(skipped))
        assert (state.gradients, state.skipped, state.skipped_in_a_row) == (1, 2, 2)
        stored, resumed = state.state_dict(), TrainState(10)
        resumed.load_state_dict(stored, global_step=3)
        assert resumed.skipped_in_a_row == stored["skipped_in_a_row"] == 2, (
            "a checkpoint does not end a series of skipped steps"
        )
        state.count_gradient(5, kind(0))
        assert (state.gradients, state.skipped, state.skipped_in_a_row) == (2, 2, 0)
        assert state.predicted_tokens == 20 and state.state_dict()["gradients"] == 2
        assert all(type(value) is int for value in state.state_dict().values())


@pytest.mark.parametrize("kind", ["adamw", "sgd", "set"])
def test_a_skipped_step_changes_nothing(kind: str) -> None:
    """The other steps have the same effect as without `step_unless`."""
    ends = []
    for skips in (True, False):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        optimizer = build_optimizer([{"params": [weight]}], OptimSection(kind="sgd" if kind == "sgd" else "adamw"))
        start_moments(optimizer, [weight])
        stepper = OptimizerSet([optimizer]) if kind == "set" else optimizer
        for factor in (1.0, math.nan, 2.0):
            weight.grad = torch.ones(7) * factor
            if skips:
                step_unless(torch.tensor(int(math.isnan(factor))), stepper)
            elif not math.isnan(factor):
                stepper.step()
        ends.append([weight.detach(), *(value for value in optimizer.state[weight].values())])
    assert all(torch.equal(skipping, plain) for skipping, plain in zip(*ends, strict=True))
    assert ends[0][0].isfinite().all()
