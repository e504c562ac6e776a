"""Check, after each start, that all ranks that read a text have the same tokens."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from llmtrain.config.data import HUB
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.python_files import PYTHON, STDLIB
from llmtrain.data.sources import STORIES
from llmtrain.data.token_digests import token_digest
from llmtrain.errors import DataError, UnavailableError
from llmtrain.parallel.mesh import Mesh

COPY_TEXT = "copy this text, and data.tokenizer if it is a file or folder, from one host to all"
"""Remedy for a local text that is not the same on all hosts."""


def check_same_tokens(mesh: Mesh, texts: Mapping[str, TokenDataset]) -> None:
    """Raise DataError on every rank if two ranks would read different tokens of a text with the same name, or if a rank can't
    read its own tokens. Tokens differ if the hub dataset, a local file or Python's standard library is not the same on all
    hosts. A collective of all ranks."""
    if mesh.world.size == 1:
        return
    mine = socket.gethostname(), *_digests(texts)
    of_ranks = mesh.all_ranks.all_gather_object(mine, "comparing token shards")
    for rank, (host, _, problem) in enumerate(of_ranks):
        if problem is not None:
            raise UnavailableError(f"rank {rank} on {host} can't read its token shards: {problem}; check that disk")
    first: dict[str, tuple[int, str, str]] = {}  # (rank, host, digest) of the first rank that reads a text, by name
    for rank, (host, digests, _) in enumerate(of_ranks):
        for name, digest in digests.items():
            first_rank, first_host, first_digest = first.setdefault(name, (rank, host, digest))
            if digest != first_digest:
                text = texts.get(name)
                source = name if text is None else text.index.source
                remedy = COPY_TEXT if text is None else remedy_for(source, text.directory)
                if text is not None and text.index.ready_made is not None:
                    remedy = "copy these files from one host to all"
                raise DataError(
                    f"{source}: rank {rank} on {host} has different tokens ({digest}) than rank {first_rank} on "
                    f"{first_host} ({first_digest}); {remedy}"
                )


def remedy_for(source: str, folder: Path) -> str:
    """Return advice on how to make the tokens of a source equal on all hosts. `folder` is its prepared folder. Copying
    that folder helps only for a hub dataset. The folder of a local text is named after the version of the text, so a
    host with another version would not find it."""
    if source.startswith(HUB):
        return f"let all hosts see one data.cache_dir, or delete {folder} on the others and copy it from one to all"
    if source in (STDLIB, PYTHON):
        return "install the same versions of Python and its packages on all hosts"
    if source == STORIES:
        return "install the same version of llmtrain on all hosts"
    return COPY_TEXT


def _digests(texts: Mapping[str, TokenDataset]) -> tuple[dict[str, str], str | None]:
    """Return (digest of each text, None), or (no digests, the error) if a text could not be read."""
    try:
        return {name: token_digest(text) for name, text in texts.items()}, None
    except UnavailableError as error:
        return {}, str(error)
