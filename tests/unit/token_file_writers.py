"""Writers of token files in the formats of other tools, independent of llmtrain's own writers."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

VOCABULARY, EOS = 7, 6
"""Number of tokens of the tokenizer that `write_tokenizer` saves, and the last of them. The tokens are five letters, unk and eos."""


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer of the letters a to e, which are tokens 0 to 4, with unk and eos."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate("abcde")}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<eos>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    assert (fast.convert_tokens_to_ids("<eos>"), len(fast)) == (EOS, VOCABULARY)
    fast.save_pretrained(folder)


def write_llm_c(
    path: Path, ids: np.ndarray, magic: int = 20240520, version: int = 1, tokens: int | None = None
) -> None:
    """Write a header of 256 int32 with magic number, version and number of tokens, and then uint16 tokens."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if tokens is None else tokens
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


def write_megatron(path: Path, ids: np.ndarray, dtype: str, lengths: list[int] | None = None) -> None:
    """Write the `.bin` and the `.idx` of a dataset whose documents have these lengths, or end with eos."""
    ends = np.flatnonzero(ids == EOS) + 1 if lengths is None else np.cumsum(lengths)
    sizes = np.diff(ends, prepend=0)
    assert sizes.sum() == len(ids)
    code = {"<u2": 8, "<i4": 4, "<i8": 5}[dtype]
    path.write_bytes(ids.astype(dtype).tobytes())
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(sizes) + 1)
    index += sizes.astype("<i4").tobytes()
    index += ((np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize).astype("<i8").tobytes()
    index += np.arange(len(sizes) + 1, dtype="<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
