"""Comparison of the tokens that hosts have prepared, because hosts without a shared folder each prepare their own."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping

import numpy as np

from llmtrain.data.index import TokenDataset
from llmtrain.data.sources import SPLITS
from llmtrain.errors import DataError
from llmtrain.parallel.mesh import Mesh

STRETCHES, LENGTH = 64, 1024
"""Number of windows compared per split, and tokens per window."""


def check_same_tokens(mesh: Mesh, texts: Mapping[str, TokenDataset]) -> None:
    """Raise DataError on every rank if hosts would read different tokens or a rank cannot read its own. Tokens
    differ if the hub dataset, a local file or Python's standard library is not the same on all hosts. A collective
    of all ranks."""
    if mesh.world.size == 1:
        return
    mine = socket.gethostname(), *_described(texts)
    of_ranks = mesh.all_ranks.all_gather_object(mine, "comparing token shards")
    for rank, (host, _, problem) in enumerate(of_ranks):
        if problem is not None:
            raise DataError(f"rank {rank} on {host} can't read its token shards: {problem}; see to that disk")
    first_host, first, _ = of_ranks[0]
    for rank, (host, theirs, _) in enumerate(of_ranks):
        for name, text in theirs.items():
            if text != first[name]:
                raise DataError(
                    f"{texts[name].index.source}: rank {rank} on {host} has other tokens ({text}) than rank 0 on {first_host} "
                    f"({first[name]}); let all hosts see one data.cache_dir, or copy {texts[name].directory} from one to all"
                )


def _described(texts: Mapping[str, TokenDataset]) -> tuple[dict[str, str], str | None]:
    """Return the digest of each text, or no digests and the reason why a text could not be read."""
    try:
        return {name: token_digest(text) for name, text in texts.items()}, None
    except OSError as error:
        return {}, str(error)


def token_digest(prepared: TokenDataset) -> str:
    """Return the token counts, the vocabulary size and a digest, as text. The digest covers vocabulary size, eos
    id, dtype and evenly spaced windows of every split."""
    counts = {split: prepared.tokens(split) for split in SPLITS}
    digest = hashlib.sha256(repr((prepared.vocab_size, prepared.eos_id, prepared.index.dtype)).encode())
    for tokens in counts.values():
        length = min(LENGTH, len(tokens))
        for start in np.linspace(0, len(tokens) - length, STRETCHES, dtype=np.int64):
            digest.update(tokens.window(int(start), length).astype("<u4").tobytes())
    sizes = " + ".join(f"{len(tokens):,}" for tokens in counts.values())
    return f"{sizes} of a vocabulary of {prepared.vocab_size:,}, {digest.hexdigest()[:8]}"
