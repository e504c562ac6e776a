"""Disk space that the tokens of hub datasets take on each host with its own `data.cache_dir`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from llmtrain.config import DataSection, Recipe
from llmtrain.config.data import HUB
from llmtrain.data.dataset import TokenDataset, read_index
from llmtrain.data.prepare import cache_path, token_dtype, tokens_to_prepare
from llmtrain.data.sources import SPLITS, Split
from llmtrain.data.text_list import texts_of, with_tokenizer_of
from llmtrain.errors import UserError
from llmtrain.train.prepare_data import tokens_of


def missing_token_bytes(recipe: Recipe, vocabulary: int, nodes: Sequence[str], shards: int) -> int | None:
    """Return the maximum bytes of tokens that a run adds to `data.cache_dir` on one node for its hub datasets; None if it has no
    hub dataset. Local texts are not counted, because their number of tokens is unknown until they are tokenized.

    `nodes` has the node name of each process. With `data.per_replica`, the node that prepares the most tokens counts.
    """
    if recipe.parallel.in_process:
        replicas = [set(range(recipe.parallel.ranks_per_process))]
    else:
        replicas = [{rank // shards for rank, name in enumerate(nodes) if name == node} for node in set(nodes)]
    counts = [tokens for own in replicas if (tokens := _missing_tokens(recipe, sorted(own))) is not None]
    return max(counts) * np.dtype(token_dtype(vocabulary)).itemsize if counts else None


def _missing_tokens(recipe: Recipe, replicas: Iterable[int]) -> int | None:
    """Return the number of tokens that a node with these replicas adds for its hub datasets, or None if it has none."""
    texts = texts_of(recipe.data, replicas)
    counts = []
    prepared: list[TokenDataset] = []
    for section, tokens in zip(texts.values(), tokens_of(recipe, texts), strict=True):
        if (text := _find_prepared(with_tokenizer_of(prepared, section))) is not None:
            prepared.append(text)
        if section.source.startswith(HUB):
            there = {} if text is None else _tokens_there(text)
            needed = tokens_to_prepare(section, tokens, recipe.eval.tokens + 1)
            counts.append(sum(max(0, needed[split] - there.get(split, 0)) for split in SPLITS))
    return sum(counts) if counts else None


def _find_prepared(section: DataSection) -> TokenDataset | None:
    with suppress(UserError):
        directory = cache_path(section)
        return TokenDataset(directory, read_index(directory))
    return None


def _tokens_there(text: TokenDataset) -> dict[Split, float]:
    """Return the number of prepared tokens of each split; it is infinite for a split whose source has ended, which lacks none."""
    splits = text.index.splits
    return {split: float("inf") if entry.exhausted else entry.tokens for split, entry in splits.items()}
