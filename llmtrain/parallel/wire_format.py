"""Wire formats: the number formats to which a message's values are rounded before they are sent. Codes of 8 or 4
bits share a scale per group of values."""

from __future__ import annotations

import math

import torch

from llmtrain.pieces import pieces

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
        self._pieces, self._encode_groups, self._decode_groups = pieces, _encode_groups, _decode_groups
        if compiled:  # one pass over all values needs no pieces
            self._pieces = lambda *tensors: [tensors]
            self._encode_groups = torch.compile(_encode_groups, dynamic=True)  # messages have many sizes
            self._decode_groups = torch.compile(_decode_groups, dynamic=True)

    def size(self, values: int) -> int:
        """Return the bytes of `values` encoded values. The number must be a multiple of SCALE_GROUP_SIZE."""
        assert values % SCALE_GROUP_SIZE == 0, values
        if self.kind == "bf16":
            return 2 * values
        return (values if self.kind == "int8" else values // 2) + values // SCALE_GROUP_SIZE * SCALE_BYTES

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode floats [rows, n], n a multiple of SCALE_GROUP_SIZE, as bytes: uint8 [rows, size(n)]. A row's scales
        follow its codes."""
        if self.kind == "bf16":
            return values.to(torch.bfloat16).view(torch.uint8)
        payload = torch.empty(len(values), self.size(values.shape[1]), dtype=torch.uint8, device=values.device)
        for row, sent in zip(values, payload, strict=True):
            codes, scales = self._codes_and_scales(sent)
            for part, of_codes, of_scales in self._pieces(row.view(-1, SCALE_GROUP_SIZE), codes, scales):
                # Written here, because torch.compile does not write to two views of one tensor in different dtypes.
                encoded, scale = self._encode_groups(part, self._levels)
                of_codes.copy_(encoded)
                of_scales.copy_(scale)
        return payload

    def decode(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Invert `encode`, up to rounding: [rows, n] of `dtype`."""
        if self.kind == "bf16":
            return payload.view(torch.bfloat16).to(dtype)
        groups = payload.shape[1] // self.size(SCALE_GROUP_SIZE)
        values = torch.empty(len(payload), groups * SCALE_GROUP_SIZE, dtype=dtype, device=payload.device)
        for row, received in zip(values, payload, strict=True):
            codes, scales = self._codes_and_scales(received)
            for part in self._pieces(row.view(-1, SCALE_GROUP_SIZE), codes, scales):
                self._decode_groups(*part)
        return values

    def _codes_and_scales(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one encoded row: codes [groups, bytes], uint8, and scales [groups, 1], float32."""
        groups = len(encoded) // self.size(SCALE_GROUP_SIZE)
        codes, scales = encoded.split([len(encoded) - groups * SCALE_BYTES, groups * SCALE_BYTES])
        return codes.view(groups, -1), scales.view(torch.float32).view(groups, 1)

    def padded_chunk(self, numel: int, ranks: int) -> int:
        """Return the number of values in each rank's chunk of a message of `numel` values, a multiple of
        SCALE_GROUP_SIZE. The last groups are padded."""
        return math.ceil(numel / ranks / SCALE_GROUP_SIZE) * SCALE_GROUP_SIZE


def _encode_groups(groups: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round groups [G, SCALE_GROUP_SIZE] to codes from -levels to levels. Return codes [G, bytes], uint8, and scales
    [G, 1], float32."""
    scales = (groups.abs().amax(-1, keepdim=True) / levels).to(torch.float32)
    quotients = groups / torch.where(scales > 0, scales, 1.0)
    # NaN becomes an arbitrary code, but the group's scale is non-finite too and makes all its values non-finite.
    rounded = quotients.round_().clamp_(-levels, levels).to(torch.int8)
    if levels > 7:
        return rounded.view(torch.uint8), scales
    pairs = (rounded + 8).view(torch.int16)  # two codes per int16, so no strided slices are needed
    return (pairs | (pairs >> 4)).to(torch.uint8), scales  # its low byte


def _decode_groups(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the values of codes and scales to groups [G, SCALE_GROUP_SIZE]."""
    if codes.shape[1] == SCALE_GROUP_SIZE:
        signed = codes.view(torch.int8)
    else:
        pairs = codes.to(torch.int16)
        signed = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)
    groups.copy_(signed).mul_(scales)
