"""Tests that the host does not wait for the GPU in a step without synchronization of replicas, and that torch.compile
compiles once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from llmtrain.config import Recipe, SyncSection
from llmtrain.train.metric_gather import DeviceNumbers, IntervalMetrics
from llmtrain.train.state import TrainState
from tests.distributed.fake_engine import choices
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, LLAMA, Case, build_case, mesh_of, micro_batches
from tests.distributed.reshard_runs import Part, Seen, recipe_of, trainer_of, write_texts
from tests.emulated_gpu import as_cuda
from tests.gpu.on_gpu import CYCLES, IS_EMULATED, case_of
from tests.inside_torch import Compilations, compilations, forget_compilations, occupy_stream

FIRST = 2
"""Number of first steps, in which kernels, moments and an anchor are created."""
LOCAL = choices("diloco", 1000, warmup_steps=0)
SYNCHRONOUS = choices("synchronous")


@contextmanager
def host_waits_are_errors() -> Iterator[None]:
    """Raise an error where the host waits for the GPU; on an emulated GPU, on exit."""
    before = as_cuda.loaded().host_reads() if IS_EMULATED else 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if IS_EMULATED:
        assert as_cuda.loaded().host_reads() == before, "the host has waited"


def train_without_waiting(case: Case) -> tuple[list[float], Compilations, Compilations]:
    """Train, and return the losses and the counts of torch.compile after the first steps and after all steps."""
    forget_compilations()
    engine, method = build_case(case, mesh_of(1, 1, case.device), clock=lambda: 0.0)
    state, losses = TrainState(case.steps), []

    def run(step: int) -> None:
        plan = method.begin_step(step, case.optim["lr"])
        losses.append(engine.forward_backward(micro_batches(case, engine.mesh, step)))
        engine.step(plan.lr)
        state.count_gradient(1, engine.skipped)
        method.end_step(step)

    for step in range(1, FIRST + 1):
        run(step)
    first = compilations()
    with host_waits_are_errors():
        for step in range(FIRST + 1, case.steps + 1):
            run(step)
    return torch.stack(losses).tolist(), first, compilations()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", [LLAMA, GPT_NEO], ids=["llama", "gpt_neo"])
@pytest.mark.parametrize("sync", [LOCAL, SYNCHRONOUS], ids=["local", "synchronous"])
def test_the_host_waits_for_nothing_in_a_step(
    ranks: RankPool, sync: SyncSection, model: object, compiled: bool
) -> None:
    case = case_of(sync, model=model, parallel={"precision": "bf16", "compile": compiled})
    [(losses, first, after)] = ranks.run(train_without_waiting, case, world_size=1)
    assert losses[-1] == losses[-1]  # not NaN
    assert not after.breaks
    assert after == first, "compiled again after the first steps"
    assert (first.graphs > 0) == compiled


def skip_without_waiting(case: Case) -> tuple[dict[str, float], bool, bool]:
    """Train three steps, of which the second has a gradient of NaN. Return the counts, whether the second step left a
    parameter and its moments unchanged, and whether the third step left any of them unchanged."""
    engine, _ = build_case(case, mesh_of(1, 1, case.device), clock=lambda: 0.0)
    state, interval, kept = TrainState(case.steps), IntervalMetrics(), []
    weight = engine.masters[-1][0]
    for step, factor in enumerate((1.0, math.nan, 1.0), start=1):
        loss = engine.forward_backward(micro_batches(case, engine.mesh, step))
        for master in (master for masters in engine.masters for master in masters if master.grad is not None):
            master.grad *= factor
        with host_waits_are_errors():
            norm = engine.step(1e-2)
            state.count_gradient(1, engine.skipped)
            interval.add_gradient(1, 0, loss, norm, engine.skipped)
        kept.append([weight.clone(), *(value.clone() for value in engine.optimizer.state[weight].values())])
    same, same_after_next = (
        [torch.equal(one, other) for one, other in zip(kept[at], kept[at + 1], strict=True)] for at in (0, 1)
    )
    counts = {name: float(getattr(state, name)) for name in ("gradients", "skipped", "skipped_in_a_row")}
    return counts, all(same), any(same_after_next)


def test_a_bad_step_is_skipped_without_waiting(ranks: RankPool) -> None:
    case = case_of(LOCAL, optim={"lr": 1e-2, "nonfinite": "skip"})
    [(counts, same, same_after_next)] = ranks.run(skip_without_waiting, case, world_size=1)
    assert counts == {"gradients": 2, "skipped": 1, "skipped_in_a_row": 0}
    assert same and not same_after_next


def read_late() -> tuple[bool, bool, dict[str, float]]:
    """Return whether the numbers of a busy GPU were ready at once, whether they were after reading, and the numbers."""
    number = torch.full((), 1.5, device="cuda")
    # CUDA may wait for running kernels when it pins memory, which torch does for the first numbers of each size.
    DeviceNumbers({"late": number, "exact": number.double()}).read()
    occupy_stream(5 * CYCLES)
    with host_waits_are_errors():
        numbers = DeviceNumbers({"known": 2.0, "late": number + 1, "exact": number.double() / 3})
        at_once = numbers.is_ready
    read = numbers.read()
    return at_once, numbers.is_ready, read


def test_numbers_come_once_the_gpu_has_them(ranks: RankPool) -> None:
    [found] = ranks.run(read_late, world_size=1)
    assert found == (False, True, {"known": 2.0, "late": 2.5, "exact": 0.5})


def log_while_busy(recipe: Recipe) -> tuple[float, float, float, float]:
    """Log a line while the GPU is busy. Return the interval's step seconds before the line, the line's step seconds,
    the next interval's step seconds after its first step, and the line's loss."""
    trainer = trainer_of(Part(recipe, 1, 1, recipe.train.total_steps, device="cuda"), Seen())
    metrics, state = trainer.metrics, trainer.state
    with metrics.open(state):
        trainer.train_step()
        state.advance(1)
        metrics.log(state, 1e-3)  # pins memory for a line's numbers, for which CUDA may wait for running kernels
        metrics.wait()
        trainer.train_step()
        state.advance(1)
        metrics.poll()
        so_far = metrics.interval.step_seconds
        occupy_stream(10 * CYCLES)
        with host_waits_are_errors():
            metrics.log(state, 1e-3)
        trainer.train_step()
        metrics.poll()
        following = metrics.interval.step_seconds
        metrics.wait()
    return so_far, metrics.last_line["perf/step_seconds"], following, metrics.last_line["train/loss"]


def test_a_log_line_keeps_the_gpu_busy_and_has_its_time(ranks: RankPool, tmp_path: Path) -> None:
    """The GPU works on the line's last step until the next step has been enqueued."""
    write_texts(tmp_path)
    recipe = recipe_of(tmp_path, "busy", "train.steps=4", "parallel.precision=fp32", "sync.method=local_sgd")
    [(so_far, on_line, following, loss)] = ranks.run(log_while_busy, recipe, world_size=1)
    assert 0 < so_far < on_line and following == 0 and 0 < loss < 10


def wait_on_purpose() -> None:
    value = torch.ones(4, device="cuda")
    with host_waits_are_errors():
        value.sum().item()


@pytest.mark.parametrize("what", ["value", "copy"])
def test_a_wait_is_seen(ranks: RankPool, what: str) -> None:
    waits = wait_on_purpose if what == "value" else copy_on_purpose
    with pytest.raises(AssertionError, match=r"synchroniz|the host has waited"):
        ranks.run(waits, world_size=1)


def copy_on_purpose() -> None:
    with host_waits_are_errors():
        torch.tensor([1.0], device="cuda")
