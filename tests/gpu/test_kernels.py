"""Compiled kernels compute what plain ones do: the rounding of messages to the last bit, the loss as closely as its precision."""

from __future__ import annotations

import pytest
import torch

from llmtrain.loss import summed_cross_entropy
from llmtrain.parallel.wire_format import WireFormat
from tests.distributed.pool import RankPool
from tests.unit.test_loss import expected, found


def messages(kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a plain and a compiled payload, and what both decode to."""
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
    """Return loss and gradients on the GPU, and those of fp64 on the CPU."""
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
