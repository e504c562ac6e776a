"""Check after each start that all ranks that read a text have the same tokens of it."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from llmtrain.data.dataset import TokenDataset, token_digest
from llmtrain.errors import DataError
from llmtrain.parallel.mesh import Mesh


def check_same_tokens(mesh: Mesh, texts: Mapping[str, TokenDataset]) -> None:
    """Raise DataError on every rank if two ranks would read different tokens of a text with the same name, or if a rank can't
    read its own tokens. Tokens differ if the hub dataset, a local file or Python's standard library is not the same on all
    hosts. All ranks must call this, because it is a collective."""
    if mesh.world.size == 1:
        return
    mine = socket.gethostname(), *_described(texts)
    of_ranks = mesh.all_ranks.all_gather_object(mine, "comparing token shards")
    for rank, (host, _, problem) in enumerate(of_ranks):
        if problem is not None:
            raise DataError(f"rank {rank} on {host} can't read its token shards: {problem}; see to that disk")
    first: dict[str, tuple[int, str, str]] = {}
    for rank, (host, theirs, _) in enumerate(of_ranks):
        for name, text in theirs.items():
            other, other_host, there = first.setdefault(name, (rank, host, text))
            if text != there:
                own = texts.get(name)
                what, folder = (name, "its tokens") if own is None else (own.index.source, own.directory)
                remedy = f"let all hosts see one data.cache_dir, or copy {folder} from one to all"
                if own is not None and own.index.ready_made is not None:
                    remedy = "copy these files from one host to all"
                raise DataError(
                    f"{what}: rank {rank} on {host} has other tokens ({text}) than rank {other} on {other_host} "
                    f"({there}); {remedy}"
                )


def _described(texts: Mapping[str, TokenDataset]) -> tuple[dict[str, str], str | None]:
    """Return (digest of each text, None), or (no digests, the error) if a text could not be read."""
    try:
        return {name: token_digest(text) for name, text in texts.items()}, None
    except OSError as error:
        return {}, str(error)
