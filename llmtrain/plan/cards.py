"""GPUs by name: peak rate in dense bf16 matrix products, and memory.

The figures were written down from memory and not compared with the data sheets, so check a figure before you publish a
number that depends on it. They should be those of NVIDIA's data sheets of GB200 NVL72 (per GPU), HGX B200, H200, H100,
GH200, A100, L40S, L40, L4 and A10. For the GeForce cards they are the rates with fp32 accumulation in NVIDIA's white
papers on Ada (appendix A) and GA102. Where a sheet gives only the rate for sparse matrices, which is twice as high,
half of it is used. Of the memory sizes of A100 and H100, the larger is listed, and of those of GH200, the smaller.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmtrain.errors import UserError
from llmtrain.recipe_messages import closest

GPU_EFFICIENCY = 0.4
"""Fraction of its bf16 peak that a GPU is assumed to reach in training. It was not measured with this package. Cited from
memory: Llama 3 reached 0.38 to 0.43 on 8,192 to 16,384 H100 (arXiv 2407.21783, table 4), and PaLM 0.46 (arXiv 2204.02311)."""


@dataclass(frozen=True)
class GpuCard:
    """A kind of GPU."""

    name: str
    """Words of the device name that the driver reports."""
    peak_flops: float
    """FLOP/s in dense bf16 matrix products."""
    gigabytes: int
    """Nominal memory. torch sees about as many GiB, except on cards that keep error-correcting codes in this memory."""
    usable: float = 1.0
    """Fraction of `gigabytes` that torch sees."""

    @property
    def option(self) -> str:
        """Name of the card as a value of `--gpu`."""
        return self.name.lower().replace(" ", "-")


ECC_IN_MEMORY = 0.92
"""Fraction of the memory that torch sees: 44.4 GiB of an L40S, 22 of an L4. The A10's was not looked up."""
CARDS = (
    GpuCard("GB200", 2500e12, 186),
    GpuCard("B200", 2250e12, 180),
    GpuCard("H200 NVL", 835e12, 141),
    GpuCard("H200", 989e12, 141),
    GpuCard("GH200", 989e12, 96),
    GpuCard("H100 PCIe", 756e12, 80),
    GpuCard("H100 NVL", 835e12, 94),
    GpuCard("H100", 989e12, 80),
    GpuCard("A100", 312e12, 80),
    GpuCard("L40S", 362e12, 48, ECC_IN_MEMORY),
    GpuCard("L40", 181e12, 48, ECC_IN_MEMORY),
    GpuCard("L4", 121e12, 24, ECC_IN_MEMORY),
    GpuCard("A10", 125e12, 24, ECC_IN_MEMORY),
    GpuCard("RTX 4090", 165e12, 24),
    GpuCard("RTX 3090", 71e12, 24),
)
"""Known cards. A device counts as the first card whose name occurs in the device's name as complete words, so an A10G
is not an A10."""


def card_of(device_name: str) -> GpuCard | None:
    """Return the card for a device name as the driver reports it. Return None for an unknown card, for another variant
    of a known card (such as a laptop's), and for a part of a card (MIG)."""
    if re.search(r"\b(MIG|Laptop|Max-Q|Ti|4090 D)\b", device_name):
        return None
    return next((card for card in CARDS if re.search(rf"\b{card.name}\b", device_name)), None)


def card_named(option: str) -> GpuCard:
    """Return the card that a `--gpu` option names, in upper or lower case. Raises UserError for an unknown card."""
    by_option = {card.option: card for card in CARDS}
    wanted = option.lower().replace(" ", "-").replace("_", "-")
    if wanted in by_option:
        return by_option[wanted]
    near = closest(wanted, by_option)
    hint = f"did you mean {near}? " if near else ""
    raise UserError(f"--gpu {option} is not a known card; {hint}known are {', '.join(by_option)}; or give --tflops")
