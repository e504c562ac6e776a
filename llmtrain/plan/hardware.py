"""Hardware for which `recipe show` estimates memory and time: a named card, a given rate, or this machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from llmtrain.config import Recipe
from llmtrain.errors import RecipeError, UserError
from llmtrain.plan.cards import GPU_EFFICIENCY, GpuCard, card_named
from llmtrain.plan.time_estimate import HardwareRates, rate_here


@dataclass(frozen=True)
class Hardware:
    """Devices of the ranks, and their rates."""

    rates: HardwareRates
    device: str
    """Words for one device, such as `each H100`."""
    source: str
    """Origin of the rate, for a footnote."""
    on_gpu: bool
    is_this_cpu: bool = False
    """True if the rate was measured on this machine's CPU, so that it says nothing about a larger mesh."""
    card: GpuCard | None = None


def hardware_of(
    recipe: Recipe, gpu: str | None, tflops: float | None, mbit: float, latency_ms: float = 0.0
) -> Hardware:
    """Return the hardware of `recipe show`'s options. Measures this machine's rate if neither a card nor a rate is given.

    Raises UserError for an unknown card, or a rate or latency that is not finite. Raises RecipeError if a card is given
    without a rate and the recipe does not compute in bf16, because a card's rate is its rate in bf16.
    """
    for option, rate in (("--tflops", tflops), ("--mbit", mbit), ("--latency-ms", latency_ms)):
        if rate is not None and not math.isfinite(rate):
            raise UserError(f"{option} is {rate:g}; expected a finite number")
    card = None if gpu is None else card_named(gpu)
    rank = "the process" if recipe.parallel.in_process else "each rank"
    if card is None:
        device, on_gpu = rank, torch.cuda.is_available()
    else:
        device, on_gpu = f"each {card.name}", True
    if tflops is not None:
        return Hardware(HardwareRates(tflops * 1e12, mbit, latency_ms), device, "--tflops", on_gpu, card=card)
    if card is not None:
        if recipe.parallel.precision != "bf16":
            raise RecipeError(
                f"--gpu {card.option} gives a rate in bf16, but parallel.precision is {recipe.parallel.precision}; "
                "add parallel.precision=bf16, or give --tflops"
            )
        source = f"{GPU_EFFICIENCY:.0%} of the peak in bf16; --tflops"
        return Hardware(
            HardwareRates(GPU_EFFICIENCY * card.peak_flops, mbit, latency_ms), device, source, True, card=card
        )
    device = "each GPU like the one here" if on_gpu else f"{rank} on this CPU"
    source = "measured here; --gpu, --tflops"
    return Hardware(HardwareRates(rate_here(recipe), mbit, latency_ms), device, source, on_gpu, is_this_cpu=not on_gpu)
