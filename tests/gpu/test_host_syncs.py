"""In a step that does not synchronize replicas the host waits for nothing; and torch.compile compiles once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from llmtrain.config import SyncSection
from tests.distributed.fake_engine import choices
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, LLAMA, Case, build_case, mesh_of, micro_batches
from tests.emulated_gpu import as_cuda
from tests.gpu.on_gpu import IS_EMULATED, case_of
from tests.inside_torch import Compilations, compilations, forget_compilations

FIRST = 2
"""Steps in which things are made: kernels, moments, an anchor."""
LOCAL = choices("diloco", 1000, warmup_steps=0)
SYNCHRONOUS = choices("synchronous")


@contextmanager
def host_waits_are_errors() -> Iterator[None]:
    """Raise where the host waits for the GPU; on an emulated one, at the end."""
    before = as_cuda.loaded().host_reads() if IS_EMULATED else 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if IS_EMULATED:
        assert as_cuda.loaded().host_reads() == before, "the host has waited"


def train_without_waiting(case: Case) -> tuple[list[float], Compilations, Compilations]:
    """Return the losses, and what was compiled after the first steps and after all."""
    forget_compilations()
    engine, method = build_case(case, mesh_of(1, 1, case.device), clock=lambda: 0.0)
    losses = []

    def run(step: int) -> None:
        plan = method.begin_step(step, case.optim["lr"])
        losses.append(engine.forward_backward(micro_batches(case, engine.mesh, step)))
        engine.step(plan.lr)
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
