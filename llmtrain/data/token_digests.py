"""Digests of a few windows of tokens, by which ranks and runs recognize a text without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from llmtrain.data.dataset import TokenDataset
from llmtrain.data.sources import SPLITS
from llmtrain.data.tokens import Tokens

WINDOW = 1024
"""Tokens per window."""
SPLIT_WINDOWS = 64
"""Windows per split in the digest of a dataset."""


def token_digest(prepared: TokenDataset) -> str:
    """Return the token counts, the vocabulary size and a digest, as text. The digest covers the vocabulary size, the eos
    id, the dtype and evenly spaced windows of every split."""
    splits = [prepared.tokens(split) for split in SPLITS]
    windows = chain.from_iterable(spaced_windows(tokens, 0, len(tokens), SPLIT_WINDOWS) for tokens in splits)
    digest = digest_windows(windows, repr((prepared.vocab_size, prepared.eos_id, prepared.index.dtype)).encode())
    sizes = " + ".join(f"{len(tokens):,}" for tokens in splits)
    return f"{sizes} of a vocabulary of {prepared.vocab_size:,}, {digest}"


def spaced_windows(tokens: Tokens, start: int, end: int, count: int) -> Iterator[np.ndarray]:
    """Yield `count` evenly spaced windows of tokens [start, end), from the first to the last."""
    length = min(WINDOW, end - start)
    for first in np.linspace(start, end - length, count, dtype=np.int64):
        yield tokens.window(int(first), length)


def digest_windows(windows: Iterable[np.ndarray], prefix: bytes = b"") -> str:
    """Return eight hexadecimal digits that depend on `prefix` and the tokens, but not on the tokens' dtype."""
    digest = hashlib.sha256(prefix)
    for window in windows:
        digest.update(window.astype("<u4").tobytes())
    return digest.hexdigest()[:8]
