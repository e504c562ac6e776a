"""Tests of replicas in one process that take turns on a GPU: they train like processes that share it, because each
replica has its own state of the GPU's generator."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.config import VirtualClockSection
from llmtrain.sync.schedules.group_averager import Payloads
from llmtrain.sync.schedules.memory_averager import MemoryAverager
from tests.distributed.fake_engine import choices, edit
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, Case, Outcome, Run
from tests.distributed.test_in_process import DROPOUT, assert_same, process_of, train_as_process, train_in_process
from tests.distributed.test_virtual_clock import in_process
from tests.gpu.on_gpu import PENALTY, case_of

DROPPING = GPT_NEO.model_copy(update={"config": {**GPT_NEO.config, **DROPOUT}})


def dropping(compiled: bool) -> Case:
    """Return a case of two replicas in bf16 with dropout: synchronous steps, then EDiT."""
    sync = edit(every=2, warmup_steps=2, penalty=PENALTY, offload=True)
    return case_of(sync, 2, model=DROPPING, parallel={"precision": "bf16", "compile": compiled})


def train_together(case: Case, own_generators: bool = True) -> list[Outcome]:
    """Train all replicas in this process with deterministic kernels. Without `own_generators`, they share the generators' state."""
    assert process_of(1).device.type == case.device
    with ExitStack() as stack:
        for module in (torch, torch.cuda) if not own_generators else ():
            stack.enter_context(mock.patch.object(module, "set_rng_state"))
        stack.enter_context(repeatably())
        return train_in_process(case)


def train_apart(case: Case) -> Outcome:
    """Train this rank's replica with deterministic kernels."""
    with repeatably():
        return train_as_process(case)


def repeatably() -> ExitStack:
    """Return a context with deterministic kernels and, to be the same in all processes, attention of plain operations."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        return stack.pop_all()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_replicas_of_a_process_train_like_two_processes(ranks: RankPool, compiled: bool) -> None:
    """Compiled replicas are equal, too, because the two processes find the kernels that the one process has compiled."""
    [ours] = ranks.run(train_together, dropping(compiled), world_size=1)
    for mine, theirs in zip(ours, ranks.run(train_apart, dropping(compiled), world_size=2), strict=True):
        assert_same(mine, theirs)


def test_with_one_state_of_the_generators_they_do_not(ranks: RankPool) -> None:
    [ours], [shared] = (ranks.run(train_together, dropping(False), own, world_size=1) for own in (True, False))
    assert ours[0].losses != shared[0].losses


def pinned_averages(case: Case) -> list[bool]:
    """Return, for each tensor of WAGMA's group averages that was copied to the GPU, whether it was in pinned memory."""
    pinned, collect = [], MemoryAverager.collect

    def noted(self: MemoryAverager, iteration: int) -> tuple[Payloads, int]:
        sums, version = collect(self, iteration)
        pinned.extend(part.is_pinned() for part in sums)
        return sums, version

    with mock.patch.object(MemoryAverager, "collect", noted):
        in_process(VirtualClockSection(step_seconds=(1.0, 1.5)), lambda mesh: Run(case, mesh).train(case.steps))
    return pinned


@pytest.mark.real_gpu
def test_averages_of_wagma_come_to_the_gpu_from_pinned_memory(ranks: RankPool) -> None:
    sync = choices("wagma", 4, schedule={"kind": "wait_avoiding", "group_size": 2})
    [pinned] = ranks.run(pinned_averages, case_of(sync, 2), world_size=1)
    assert pinned and all(pinned)
