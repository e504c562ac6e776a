"""Sparse wire format (SparseLoCo, arXiv 2508.15706): the largest values of each chunk are sent, with their indices.

A chunk has 4096 values, so an index takes 12 bits. From a shorter last chunk, the same fraction of values is sent,
rounded up. A sent value takes 2 bits: a sign and one of its chunk's two magnitudes (levels). The levels, in fp32, are
the means of the larger and of the smaller half of the magnitudes that are sent. With 64 values, a chunk takes 96 bytes
of indices, 16 of values and 8 of levels, 0.029 bytes per value of the message.

Differs from the paper: chunks are of consecutive values of a rank's part of a block, not of 64 x 64 values of a matrix. The paper
was not available to us, so we could not compare its levels, or see whether it counts their bytes (without them, 12 bits per index
and 2 per value).
"""

from __future__ import annotations

import torch

CHUNK = 4096
LEVELS = 2
"""Magnitudes per chunk."""
LEVEL_BYTES = 4


class SparseFormat:
    """Encoder and decoder of the `keep` largest magnitudes of each chunk of CHUNK values.

    `values` is "2bit", or "fp32" for unrounded values in the message's dtype. If a chunk has non-finite values, some of
    them are sent. With "2bit", at least the larger half of the chunk's sent values then becomes non-finite.
    """

    def __init__(self, keep: int, values: str):
        self.keep, self.is_rounded = keep, values == "2bit"

    def size(self, numel: int, value_bytes: int = 4) -> int:
        """Return the number of bytes of an encoded message of `numel` values, each of `value_bytes` bytes before encoding."""
        return sum(chunks * self._chunk_bytes(kept, value_bytes) for chunks, _, kept in self._parts(numel))

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the encoded bytes of a flat tensor, uint8 [size(numel)]."""
        encoded, start = [], 0
        for chunks, length, kept in self._parts(values.numel()):
            part = values[start : start + chunks * length].view(chunks, length)
            encoded.append(self._encode_chunks(part, kept))
            start += part.numel()
        return torch.cat(encoded)

    def add_decoded(self, encoded: torch.Tensor, total: torch.Tensor) -> None:
        """Add the values of an encoded message to the flat tensor `total`, of the same length and dtype as the message."""
        start = taken = 0
        for chunks, length, kept in self._parts(total.numel()):
            size = chunks * self._chunk_bytes(kept, total.element_size())
            values, indices = self._decode_chunks(encoded[taken : taken + size], chunks, kept, total.dtype)
            # No index occurs twice in a chunk, so the sum does not depend on the order of the additions.
            total[start : start + chunks * length].view(chunks, length).scatter_add_(1, indices, values)
            start, taken = start + chunks * length, taken + size

    def _parts(self, numel: int) -> list[tuple[int, int, int]]:
        """Return (number of chunks, values per chunk, values sent per chunk) for the full chunks, and for the last
        chunk if it is shorter."""
        whole, rest = divmod(numel, CHUNK)
        parts = [(whole, CHUNK, self.keep), (1, rest, -(-self.keep * rest // CHUNK))]
        return [part for part in parts if part[0] * part[1]]

    def _chunk_bytes(self, kept: int, value_bytes: int) -> int:
        encoded_value_bytes = LEVELS * LEVEL_BYTES + -(-kept // 4) if self.is_rounded else kept * value_bytes
        return encoded_value_bytes + 3 * -(-kept // 2)

    def _encode_chunks(self, chunks: torch.Tensor, kept: int) -> torch.Tensor:
        magnitudes, order = chunks.abs().topk(kept, dim=1)
        indices, rank = order.sort(dim=1)
        values = chunks.gather(1, indices)
        if not self.is_rounded:
            return torch.cat([values.view(torch.uint8).reshape(-1), _pack_indices(indices).reshape(-1)])
        larger = (kept + 1) // 2
        levels = torch.zeros(len(chunks), LEVELS, dtype=torch.float32, device=chunks.device)
        levels[:, 1] = magnitudes[:, :larger].mean(1)
        if kept > larger:
            levels[:, 0] = magnitudes[:, larger:].mean(1)
        codes = (values < 0).to(torch.uint8) + 2 * (rank < larger).to(torch.uint8)
        parts = (levels.view(torch.uint8), _pack_codes(codes), _pack_indices(indices))
        return torch.cat([part.reshape(-1) for part in parts])

    def _decode_chunks(
        self, encoded: torch.Tensor, chunks: int, kept: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values that were sent and their indices, each [chunks, kept]."""
        index_bytes = chunks * 3 * -(-kept // 2)
        value_part, packed = encoded.split([len(encoded) - index_bytes, index_bytes])
        indices = _unpack_indices(packed.view(chunks, -1), kept)
        if not self.is_rounded:
            aligned = value_part.clone()  # because views need aligned bytes
            return aligned.view(dtype).view(chunks, kept), indices
        level_bytes = chunks * LEVELS * LEVEL_BYTES
        levels, packed = value_part.split([level_bytes, len(value_part) - level_bytes])
        codes = _unpack_codes(packed.view(chunks, -1), kept)
        magnitudes = levels.clone().view(torch.float32).view(chunks, LEVELS).to(dtype).gather(1, codes >> 1)
        return torch.where(codes & 1 == 1, -magnitudes, magnitudes), indices


def _pack_indices(indices: torch.Tensor) -> torch.Tensor:
    """Pack numbers below CHUNK [C, n], two in three bytes: uint8 [C, 3 ceil(n / 2)]."""
    pairs = torch.nn.functional.pad(indices, (0, indices.shape[1] % 2)).view(len(indices), -1, 2)
    first, second = pairs.unbind(-1)
    packed = torch.stack([first & 0xFF, first >> 8 | (second & 0xF) << 4, second >> 4], dim=-1)
    return packed.to(torch.uint8).view(len(indices), -1)


def _unpack_indices(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Invert `_pack_indices` for `count` numbers per row: int64 [C, count]."""
    low, middle, high = packed.to(torch.int64).view(len(packed), -1, 3).unbind(-1)
    pairs = torch.stack([low | (middle & 0xF) << 8, middle >> 4 | high << 4], dim=-1)
    return pairs.view(len(packed), -1)[:, :count]


def _pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack numbers below 4 [C, n], four in a byte: uint8 [C, ceil(n / 4)]."""
    fours = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4)).view(len(codes), -1, 4)
    first, second, third, fourth = fours.unbind(-1)
    return first | second << 2 | third << 4 | fourth << 6


def _unpack_codes(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Invert `_pack_codes` for `count` numbers per row: int64 [C, count]."""
    numbers = packed.to(torch.int64)
    fours = torch.stack([numbers >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return fours.view(len(packed), -1)[:, :count]
