"""Wire formats: the number formats to which a message's values are rounded before they are sent. In formats with codes of 8, 4
or 2 bits, a group of values shares a scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import suppress

import torch

from llmtrain.compiling import Compilable, compiled
from llmtrain.pieces import PIECE_VALUES, pieces

SCALE_GROUP_SIZE = 128
"""Number of values that share one fp32 scale."""
SCALE_BYTES = 4
SMALLEST_SCALE = 2.0**-126
"""Smallest scale of int8, int4 and fp4: the smallest normal fp32 number, whose inverse is finite."""
POWERS = (0.0, *(2.0**exponent for exponent in range(-6, 1)))
"""Magnitudes of fp4, in units of the scale."""
LOW, HIGH, THRESHOLD = 0.4528 / 0.79788, 1.5104 / 0.79788, 0.9816 / 0.79788
"""Smaller and larger level of 2bit, and the magnitude that separates them. They are the optimal ones for a normal distribution
(Max 1960), in units of its mean magnitude, sqrt(2 / pi) = 0.79788 standard deviations."""

COMPILED_PIECE_VALUES = 2**19
"""Values per piece in compiled code, which passes over them only twice, for the scales and for the codes. A call then
costs more than reading values that have left the cache."""

Encoder = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""groups -> (codes, scales); see `_encode_int8` for the shapes."""
Decoder = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(groups to write, codes, scales)."""


class WireFormat:
    """Encoder and decoder of one wire format: bf16, int8, int4, fp4 or 2bit.

    bf16 takes 2 bytes per value. The others have a code of 8, 4 or 2 bits per value, and a scale s per group, 4/128 byte per
    value:

    int8, int4   x is sent as round(x * (1 / s)), where s = max |x| of x's group / 127 or 7. A value is off by at most s / 2.
    fp4          0 or +-2^-6, ..., +-1 times s = max |x| of the group: a sign and an exponent of three bits, no mantissa. A value
                 above s / 64 is off by at most a third of itself.
                 These three formats have no scale below SMALLEST_SCALE.
    2bit         +-LOW or +-HIGH times s = mean |x| of the group: the four levels with the least squared error for normally
                 distributed values. 0 has no code, so this format needs error feedback.

    Non-finite values stay non-finite; except in bf16, they make their entire group non-finite. Rounding therefore
    never makes a broken replica look healthy.
    """

    def __init__(self, kind: str, compiled: bool = False):
        """Create the format. With `compiled`, torch.compile fuses the many passes over the values into few."""
        self.kind = kind
        self._pieces = functools.partial(pieces, values=COMPILED_PIECE_VALUES if compiled else PIECE_VALUES)
        if kind == "bf16":
            return
        self._bits, self._encode_groups, self._decode_groups = CODES[kind]
        if compiled:
            self._encode_groups = _compiled_groups(self._encode_groups)
            self._decode_groups = _compiled_groups(self._decode_groups)

    def size(self, values: int) -> int:
        """Return the number of bytes that `values` values take when encoded. `values` must be a multiple of
        SCALE_GROUP_SIZE."""
        assert values % SCALE_GROUP_SIZE == 0, values
        if self.kind == "bf16":
            return 2 * values
        return self._bits * values // 8 + values // SCALE_GROUP_SIZE * SCALE_BYTES

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode floats [rows, n], n a multiple of SCALE_GROUP_SIZE, as bytes: uint8 [rows, size(n)]. A row's scales
        follow its codes."""
        if self.kind == "bf16":
            return values.to(torch.bfloat16).view(torch.uint8)
        payload = torch.empty(len(values), self.size(values.shape[1]), dtype=torch.uint8, device=values.device)
        for row, sent in zip(values, payload, strict=True):
            codes, scales = self._codes_and_scales(sent)
            for part, of_codes, of_scales in self._pieces(row.view(-1, SCALE_GROUP_SIZE), codes, scales):
                # Copied here and not in the encoder, because compiled code can't write to two views of one tensor that differ
                # in dtype.
                encoded, scale = self._encode_groups(part)
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
        """Return the number of values in each rank's chunk of a message of `numel` values, rounded up to a multiple of
        SCALE_GROUP_SIZE."""
        return math.ceil(numel / ranks / SCALE_GROUP_SIZE) * SCALE_GROUP_SIZE


def _encode_int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round groups [G, SCALE_GROUP_SIZE]. Return codes [G, bytes], uint8, and scales [G, 1], float32, as do all encoders."""
    rounded, scales = _integers(groups, 127)
    return rounded.view(torch.uint8), scales


def _decode_int8(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the values of codes and scales to groups [G, SCALE_GROUP_SIZE], as do all decoders."""
    groups.copy_(codes.view(torch.int8)).mul_(scales)


def _encode_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rounded, scales = _integers(groups, 7)
    return _packed(rounded + 8, 4), scales


def _decode_int4(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    groups.copy_(_unpacked(codes, 4).view(torch.int8).sub_(8)).mul_(scales)


def _integers(groups: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers from -levels to levels [G, SCALE_GROUP_SIZE], int8, and the scales."""
    quotients, scales = _quotients(groups, levels)
    # NaN becomes an arbitrary code, but the group's scale is non-finite too and makes all its values non-finite.
    return quotients.round_().to(torch.int8), scales


def _encode_fp4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quotients, scales = _quotients(groups, 1)
    magnitudes = quotients.abs().to(torch.float32)
    # A power of two is an exponent alone, here taken from the bits of fp32. Nearly half of a power is added first, so that values
    # above 1.5 times a power count as the next power. Between 0 and 2^-6 the boundary is 2^-7.
    exponents = (magnitudes.view(torch.int32) + 0x3FFFFF) >> 23
    powers = torch.maximum(exponents - 120, _ones(magnitudes > 2.0**-7)).clamp_(max=7)  # NaN has a large exponent
    return _packed(powers + 8 * _ones(quotients < 0), 4), scales


def _decode_fp4(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    _look_up(_unpacked(codes, 4), (*POWERS, *(-power for power in POWERS)), groups).mul_(scales)


def _encode_2bit(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The sum is in fp64, so that it hardly depends on the order of summation, which differs between devices.
    scales = groups.abs().mean(-1, keepdim=True, dtype=torch.float64).to(torch.float32)
    is_high = groups.abs() > THRESHOLD * scales.to(groups.dtype)
    return _packed(_ones(is_high) + 2 * _ones(groups < 0), 2), scales


def _decode_2bit(groups: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    _look_up(_unpacked(codes, 2), (LOW, HIGH, -LOW, -HIGH), groups).mul_(scales)


def _quotients(groups: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values divided by their group's scale, from -levels to levels, and the scales max |x| / levels. Both are computed in
    at least fp32: in bf16, rounding can exceed `levels`, and in fp16, the inverse of a small scale is infinite."""
    groups = groups.to(torch.promote_types(groups.dtype, torch.float32))
    scales = (groups.abs().amax(-1, keepdim=True) / levels).to(torch.float32).clamp_(min=SMALLEST_SCALE)
    # One division per group: a processor multiplies several times as fast as it divides.
    return groups * (1.0 / scales.to(groups.dtype)), scales


def _ones(mask: torch.Tensor) -> torch.Tensor:
    """Return 1 where a mask is true, else 0: int8, and in compiled code int32, which a CPU's vector instructions handle."""
    return mask.to(torch.int32 if torch.compiler.is_compiling() else torch.int8)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [G, n], from 0 to 2^bits - 1, into bytes, uint8 [G, n bits / 8]. Neighbors share a byte, the first one
    in its lowest bits."""
    codes = codes.to(torch.int8)
    if bits == 4 and torch.compiler.is_compiling():  # compiles to one loop over a processor's vectors
        first, second = codes.to(torch.int32).unflatten(1, (-1, 2)).unbind(2)
        return (first | (second << 4)).to(torch.uint8)
    # Neighbors are read as one integer, because a strided slice of bytes is slow.
    if bits == 4:
        pairs = codes.view(torch.int16)
        return (pairs | (pairs >> 4)).to(torch.uint8)  # its low byte
    quads = codes.view(torch.int32)
    return (quads | (quads >> 6) | (quads >> 12) | (quads >> 18)).to(torch.uint8)


def _unpacked(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes that `_packed` packed: uint8 [G, n]."""
    if bits == 4:
        pairs = codes.to(torch.int16)
        return pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    quads = codes.to(torch.int32)
    quads = quads | (quads << 6) | (quads << 12) | (quads << 18)
    return quads.bitwise_and_(0x03030303).view(torch.uint8)


def _look_up(codes: torch.Tensor, levels: tuple[float, ...], groups: torch.Tensor) -> torch.Tensor:
    """Write the level of each code to `groups`, and return them."""
    return groups.copy_(_table(levels, groups)[codes.int()])


_TABLES: dict[tuple[tuple[float, ...], torch.dtype, torch.device], torch.Tensor] = {}
"""Tensors that `_table` has made, by values, dtype and device."""


def _table(values: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """Return the values as a tensor with the dtype and device of `like`. The tensor is kept for later calls, because the host
    would wait for the GPU at every copy."""
    key = values, like.dtype, like.device
    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=like.dtype, device=like.device)
    if key not in _TABLES:
        _TABLES[key] = torch.tensor(values, dtype=like.dtype, device=like.device)
    return _TABLES[key]


def _compiled_groups(function: Compilable) -> Compilable:
    """Compile an encoder or decoder for messages of all sizes. The compiled code divides as torch itself does, so that its codes
    have the same bits. Triton's own division is approximate."""
    for option in DIVISION_OPTIONS:
        with suppress(RuntimeError):  # not all versions of torch have this option
            return compiled(function, dynamic=True, options={option: True})
    return compiled(function, dynamic=True)


DIVISION_OPTIONS = ("eager_numerics.division_rounding", "emulate_divison_rounding")
"""Names of the compiler option that makes it divide as torch does, the newest first. The second name is spelled as in torch."""


CODES: dict[str, tuple[int, Encoder, Decoder]] = {
    "int8": (8, _encode_int8, _decode_int8),
    "int4": (4, _encode_int4, _decode_int4),
    "fp4": (4, _encode_fp4, _decode_fp4),
    "2bit": (2, _encode_2bit, _decode_2bit),
}
"""Bits of a code, encoder of groups and decoder, by format."""
