"""Helpers for training on a GPU: cases, delays of streams, and waits left out on purpose."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from llmtrain.config import ModelSection, SyncSection
from llmtrain.parallel.engine import Block, Engine
from llmtrain.parallel.fsdp import Fsdp2Engine
from llmtrain.parallel.single_device import SingleDeviceEngine
from llmtrain.sync.anchors import flatten
from llmtrain.sync.offload import StreamedCopy, StreamOffload
from tests.distributed.fake_engine import edit
from tests.distributed.real_engine import LLAMA, Case, build_case, mesh_of, micro_batches
from tests.emulated_gpu import as_cuda
from tests.inside_torch import occupy_stream

IS_EMULATED = as_cuda.FOLDER in os.environ
CYCLES = 40_000_000
"""Clock cycles of a delay: some 20 ms, in which other streams do all the work that does not wait."""
WIDE = ModelSection(
    type="llama",
    config={"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8},
)
"""Model large enough that copies and matrix products take time on a GPU, and small enough for a dozen trainings per
minute, because gloo carries all parameters in every round. The delays last `CYCLES`, whatever the size."""
PENALTY = {"z": 3.0, "temperature": 1.0, "clip": 0.5}


def case_of(sync: SyncSection, replicas: int = 1, **changes: Any) -> Case:
    """Return a case whose replicas share the GPU."""
    return Case(sync, replicas, 1, device="cuda", **changes)


def offloaded(schedule: str) -> Case:
    """Return a case of EDiT with offload and two replicas: two synchronous steps, then rounds of two steps."""
    sync = edit(every=2, warmup_steps=2, penalty=PENALTY, schedule=schedule, offload=True)
    return case_of(sync, 2, model=LLAMA if IS_EMULATED else WIDE, steps=8)


# ---- delays


@contextmanager
def side_stream_delayed() -> Iterator[None]:
    """Delay every copy from and to host memory."""
    prefetch, write_back = StreamOffload.prefetch, StreamOffload.write_back

    def late(self: StreamOffload) -> None:
        with torch.cuda.stream(self._stream):
            occupy_stream(CYCLES)

    def prefetch_late(self: StreamOffload, host_copy: torch.Tensor) -> StreamedCopy:
        late(self)
        return prefetch(self, host_copy)

    def write_back_late(self: StreamOffload, host_copy: torch.Tensor, changed: torch.Tensor) -> None:
        late(self)
        write_back(self, host_copy, changed)

    with (
        mock.patch.object(StreamOffload, "prefetch", prefetch_late),
        mock.patch.object(StreamOffload, "write_back", write_back_late),
    ):
        yield


@contextmanager
def main_stream_delayed() -> Iterator[None]:
    """Delay the main stream whenever a block has changed, and thus the next block's change and all reads of both."""
    with ExitStack() as patches:
        for engine in (Fsdp2Engine, SingleDeviceEngine):
            patches.enter_context(mock.patch.object(engine, "parameters_changed", _late(engine.parameters_changed)))
        yield


def _late(changed: Callable[[Engine, Block], None]) -> Callable[[Engine, Block], None]:
    def changed_late(self: Engine, block: Block) -> None:
        occupy_stream(CYCLES)
        changed(self, block)

    return changed_late


@contextmanager
def under_fsdp2() -> Iterator[None]:
    """Use FSDP2 for replicas of one device, too."""
    with mock.patch("llmtrain.parallel.build_engine.SingleDeviceEngine", Fsdp2Engine):
        yield


# ---- waits left out


@contextmanager
def without_the_wait_of_use() -> Iterator[None]:
    """Use copies of anchors that may not have arrived yet."""
    with mock.patch.object(StreamedCopy, "use", lambda self: self._copy):
        yield


@contextmanager
def without_the_wait_of_write_back() -> Iterator[None]:
    """Copy anchors back to the host that may not have been computed yet."""

    def write_back(self: StreamOffload, host_copy: torch.Tensor, changed: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            host_copy.copy_(changed, non_blocking=True)

    with mock.patch.object(StreamOffload, "write_back", write_back):
        yield


@contextmanager
def without_the_gather_after_a_change() -> Iterator[None]:
    """Let FSDP gather from its own stream, which has waited for nothing since the forward pass began."""

    def only_reshard(self: Fsdp2Engine, block: Any) -> None:
        self._units[self.blocks.index(block)].reshard()

    with under_fsdp2(), mock.patch.object(Fsdp2Engine, "parameters_changed", only_reshard):
        yield


CHANGES = {
    made.__name__: made
    for made in (
        side_stream_delayed,
        main_stream_delayed,
        under_fsdp2,
        without_the_wait_of_use,
        without_the_wait_of_write_back,
        without_the_gather_after_a_change,
    )
}


# ---- training


@dataclass(frozen=True)
class Bits:
    """Results of a rank's training, for comparisons to the last bit."""

    losses: list[float]
    weights: dict[str, str]
    """Digests, by block."""


def train_to_bits(case: Case, changes: tuple[str, ...] = ()) -> Bits:
    """Train with deterministic kernels, and return the results. The host reads nothing from the GPU before the end.
    `changes` are names in CHANGES, applied in this order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # training does not fill it either
    losses = []
    try:
        with sdpa_kernel(SDPBackend.MATH), ExitStack() as stack:
            for name in changes:
                stack.enter_context(CHANGES[name]())
            engine, method = build_case(case, mesh_of(case.replicas, case.shard, case.device), clock=lambda: 0.0)
            for step in range(1, case.steps + 1):
                plan = method.begin_step(step, case.optim["lr"])
                losses.append(engine.forward_backward(micro_batches(case, engine.mesh, step)))
                engine.step(plan.lr)
                method.end_step(step)
            method.finish()
        weights = {block.name: _digest(flatten(block)) for block in engine.blocks}
        return Bits(torch.stack(losses).tolist(), weights)
    finally:
        torch.use_deterministic_algorithms(False)


def _digest(flat: torch.Tensor) -> str:
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()
