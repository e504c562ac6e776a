"""Wire formats: the number formats to which a message's values are rounded before they are sent. Codes of 8 or 4
bits share a scale per group of values."""

from __future__ import annotations

import math

import torch

SCALE_GROUP_SIZE = 128
"""Number of values that share one fp32 scale."""
SCALE_BYTES = 4


class WireFormat:
    """Encoder and decoder of one wire format: bf16, int8 or int4.

    bf16 takes 2 bytes per value. int8 and int4 send x as round(x / s), where s = max |x| of x's group / 127 or 7. A
    value is then off by at most s / 2 (slightly more if s is subnormal, below 1e-38). It takes 1 or 1/2 byte, plus
    4/128 byte for its share of s.

    Non-finite values stay non-finite; in int8 and int4, they make their entire group non-finite. Rounding therefore
    never makes a broken replica look healthy.
    """

    def __init__(self, kind: str, compiled: bool = False):
        """Create the format. With `compiled`, torch.compile fuses the many passes over the values into one."""
        self.kind = kind
        self._levels = {"bf16": 0, "int8": 127, "int4": 7}[kind]
        if compiled:
            self.encode = torch.compile(self.encode, dynamic=True)  # messages have many sizes
            self.decode = torch.compile(self.decode, dynamic=True)

    def size(self, values: int) -> int:
        """Return the bytes of `values` encoded values. The number must be a multiple of SCALE_GROUP_SIZE."""
        assert values % SCALE_GROUP_SIZE == 0, values
        if self.kind == "bf16":
            return 2 * values
        return (values if self.kind == "int8" else values // 2) + values // SCALE_GROUP_SIZE * SCALE_BYTES

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode floats [rows, n], n a multiple of SCALE_GROUP_SIZE, as bytes: uint8 [rows, size(n)]."""
        if self.kind == "bf16":
            return values.to(torch.bfloat16).view(torch.uint8)
        blocks = values.view(len(values), -1, SCALE_GROUP_SIZE)
        # Avoids a tensor of absolute values. The final abs_ drops the sign that -0.0 would give a zero scale.
        largest = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True)).abs_()
        scales = (largest / self._levels).to(torch.float32)
        quotients = blocks / torch.where(scales > 0, scales, 1.0)
        # NaN becomes an arbitrary code, but the block's scale is non-finite too and makes all its values non-finite.
        codes = quotients.round_().clamp_(-self._levels, self._levels).to(torch.int8).view(len(values), -1)
        if self.kind == "int4":
            pairs = (codes + 8).view(torch.int16)  # two codes per int16, so no strided slices are needed
            codes = (pairs | (pairs >> 4)).to(torch.uint8)  # its low byte
        return torch.cat([codes.view(torch.uint8), scales.view(len(values), -1).view(torch.uint8)], dim=1)

    def decode(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Invert `encode`, up to rounding: [rows, n] of `dtype`."""
        if self.kind == "bf16":
            return payload.view(torch.bfloat16).to(dtype)
        rows = len(payload)
        per_block = SCALE_GROUP_SIZE if self.kind == "int8" else SCALE_GROUP_SIZE // 2
        blocks = payload.shape[1] // (per_block + SCALE_BYTES)
        codes, scales = payload.split([blocks * per_block, blocks * SCALE_BYTES], dim=1)
        if self.kind == "int4":
            pairs = codes.to(torch.int16)
            codes = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)
        values = codes.contiguous().view(torch.int8).view(rows, blocks, SCALE_GROUP_SIZE).to(dtype)
        return values.mul_(scales.contiguous().view(torch.float32).view(rows, blocks, 1)).view(rows, -1)

    def padded_chunk(self, numel: int, ranks: int) -> int:
        """Return the number of values in each rank's chunk of a message of `numel` values, a multiple of
        SCALE_GROUP_SIZE. The last groups are padded."""
        return math.ceil(numel / ranks / SCALE_GROUP_SIZE) * SCALE_GROUP_SIZE
