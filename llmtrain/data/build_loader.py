"""Training and validation batches as a recipe describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmtrain.config import Recipe
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.document_loader import DocumentLoader, document_eval_batches
from llmtrain.data.documents import document_samples
from llmtrain.data.loader import Loader, eval_batches
from llmtrain.data.stream import GrowingTokens
from llmtrain.errors import DataError


def build_loader(
    recipe: Recipe,
    prepared: TokenDataset,
    shape: BatchShape,
    *,
    tokens: GrowingTokens | None = None,
    write: bool = True,
) -> Loader:
    """Return the loader of one rank. `tokens`, if given, are the training tokens of a folder that still grows; they are
    shuffled in blocks. With `write`, the positions at which documents start are stored in the folder of the shards. Raises
    DataError if the text is shorter than one global batch."""
    if recipe.data.packing == "none":
        return DocumentLoader(document_samples(prepared, "train", shape.sequence_length, write), shape)
    if tokens is not None:
        return Loader(tokens, shape, in_blocks=True)
    return Loader(prepared.tokens("train"), shape)


def validation_batches(
    recipe: Recipe, text: TokenDataset, *, rank: int, world: int, write: bool = True
) -> Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a function that returns an iterator over a rank's validation batches: (input_ids, labels), each int64
    [micro_batch, T]. The function raises DataError if the text is shorter than one sequence or, without packing, has no
    documents."""
    length = recipe.train.sequence_length
    shape = {
        "max_tokens": recipe.eval.tokens,
        "sequence_length": length,
        "micro_batch": recipe.train.micro_batch,
        "rank": rank,
        "world": world,
    }
    if recipe.data.packing == "none":
        return partial(document_eval_batches, document_samples(text, "validation", length, write), **shape)
    return partial(eval_batches, text.tokens("validation"), **shape)


def check_set(recipe: Recipe, name: str, text: TokenDataset) -> None:
    """Raise DataError if a text of `eval.sets` is shorter than one sequence. Without packing, one document is enough, and
    every prepared text has one."""
    tokens, needed = len(text.tokens("validation")), recipe.train.sequence_length + 1
    if recipe.data.packing == "packed" and tokens < needed:
        raise DataError(
            f"eval.sets.{name}: {recipe.eval.sets[name]}: {tokens} tokens, {needed} needed for one sequence; give a longer text, "
            "or lower train.sequence_length"
        )
