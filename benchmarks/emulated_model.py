"""Language model whose computation takes a given time but no CPU time, to measure networks on a machine with fewer cores
than replicas.

Everything else is real: parameters, autograd, and the hooks that libraries register on modules and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from loops import Pace
from torch import nn

from llmtrain.model import LanguageModel, ModelBlock, blocks_of
from llmtrain.parallel.wrapping import named_parameters_of

FORWARD_SHARE = 1 / 3
"""Share of a step's time in forward: a backward pass has twice the matrix products."""
GRADIENT_SCALE = 1e-3


def emulate(model: LanguageModel, step_seconds: float, seed: int) -> None:
    """Replace a model's forward and backward by sleeps of `step_seconds` per step. Backward yields gradients that are drawn
    from `seed` in advance, and the loss is 0.

    Each block sleeps in proportion to its matrix products. Its gradients appear when its backward ends, from the last block
    to the first, as real gradients do.
    """
    generator, clock = torch.Generator().manual_seed(seed), Pace()
    blocks = blocks_of(model)
    weights = [_multiplying(model, block) for block in blocks]
    for block, weight in zip(blocks, weights, strict=True):
        parameters = [parameter for _, parameter in named_parameters_of(model, block)]
        gradients = [torch.randn(p.shape, generator=generator).mul_(GRADIENT_SCALE) for p in parameters]
        seconds = step_seconds * weight / sum(weights)
        # The first module stands for the block, because the engine registers its hooks there.
        block.modules[0].forward = _forward_of(_Work(seconds, gradients, clock), parameters)

    def forward(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for block in blocks:
            loss = block.modules[0](loss)
        return loss

    model.forward = forward


@dataclass(frozen=True)
class _Work:
    """One block's computation: its seconds in forward and backward together, and the gradients that backward yields."""

    seconds: float
    gradients: list[torch.Tensor]
    clock: Pace


class _Sleep(torch.autograd.Function):
    """Identity function of a scalar, which takes a block's time and through which the block's parameters get their gradients."""

    @staticmethod
    def forward(ctx: Any, work: _Work, scalar: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.work = work
        work.clock.sleep(FORWARD_SHARE * work.seconds)
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.work.clock.sleep((1 - FORWARD_SHARE) * ctx.work.seconds)
        return None, gradient, *ctx.work.gradients


def _forward_of(work: _Work, parameters: list[nn.Parameter]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scalar: _Sleep.apply(work, scalar, *parameters)


def _multiplying(model: LanguageModel, block: ModelBlock) -> int:
    """Return the number of weights in a block's matrix products. Embeddings do not count unless the head shares them."""
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    looked_up.discard(id(model.causal_lm.get_output_embeddings().weight))
    return sum(p.numel() for _, p in named_parameters_of(model, block) if p.ndim >= 2 and id(p) not in looked_up)
