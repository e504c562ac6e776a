"""Tests of kernels. Compiled kernels round messages to the same bits as plain ones, and compute the loss as closely as
its precision allows. Deterministic kernels exist for all of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from llmtrain.config import ModelSection
from llmtrain.loss import summed_cross_entropy
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.train.devices import enable_determinism
from tests.distributed.fake_engine import choices
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import GPT_NEO, LLAMA, Case, build_case, mesh_of, micro_batches
from tests.gpu.on_gpu import case_of
from tests.unit.test_loss import expected, found


def messages(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (plain, compiled) for the payload and for the decoded values."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 4096, generator=generator).cuda()
    values[1] = 0.0
    plain, compiled = WireFormat(kind, False), WireFormat(kind, True)
    payloads = (plain.encode(values), compiled.encode(values))
    decoded = (plain.decode(payloads[0], values.dtype), compiled.decode(payloads[0], values.dtype))
    return [tuple(one.cpu() for one in pair) for pair in (payloads, decoded)]


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
def test_compiled_rounding_has_the_same_bits(ranks: RankPool, kind: str) -> None:
    [pairs] = ranks.run(messages, kind, world_size=1)
    for plain, compiled in pairs:
        assert torch.equal(plain, compiled)


def losses(dtype: torch.dtype, compiled: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (on the GPU, in fp64 on the CPU) for the loss and each gradient."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 64, 128), (1000, 128)))
    weight *= 0.1
    labels = torch.randint(0, 1000, (3, 64), generator=generator)
    ours, exact = (
        [one.detach().to(device, kind).requires_grad_() for one in (hidden, weight)]
        for device, kind in (("cuda", dtype), ("cpu", torch.float64))
    )
    value = summed_cross_entropy(*ours, None, labels.cuda(), chunk=80, compiled=compiled)
    pairs = zip(found(value, ours), expected(*exact, None, labels), strict=True)
    return [(mine.detach().double().cpu(), theirs.detach()) for mine, theirs in pairs]


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"])
def test_loss_and_gradients_are_those_of_fp64(
    ranks: RankPool, dtype: torch.dtype, close: float, compiled: bool
) -> None:
    [pairs] = ranks.run(losses, dtype, compiled, world_size=1)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close * float(theirs.abs().max()))


def losses_twice(case: Case) -> list[list[float]]:
    """Return the losses of two runs with `train.deterministic`, for which torch refuses nondeterministic kernels."""
    enable_determinism(torch.device("cuda"))
    try:
        return [_losses_of(case) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)


def _losses_of(case: Case) -> list[float]:
    engine, method = build_case(case, mesh_of(1, 1, case.device), clock=lambda: 0.0)
    losses = []
    for step in range(1, case.steps + 1):
        plan = method.begin_step(step, case.optim["lr"])
        losses.append(engine.forward_backward(micro_batches(case, engine.mesh, step)))
        engine.step(plan.lr)
        method.end_step(step)
    return torch.stack(losses).tolist()


@pytest.fixture(scope="module")
def fresh() -> Iterator[RankPool]:
    """Provide a new rank, because torch reads cuBLAS's configuration once, at the first matrix product."""
    pool = RankPool(1)
    yield pool
    pool.close()


@pytest.mark.parametrize("model", [LLAMA, GPT_NEO], ids=["llama", "gpt_neo"])
def test_deterministic_training_runs_and_repeats_itself(fresh: RankPool, model: ModelSection) -> None:
    case = case_of(choices("synchronous"), model=model, steps=4, parallel={"precision": "bf16"})
    [[first, second]] = fresh.run(losses_twice, case)
    assert first == second and len(set(first)) > 1
