"""Preparation of the tokens that a run trains on and is validated on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from llmtrain.config import DataSection, Recipe
from llmtrain.data.build_loader import check_set
from llmtrain.data.dataset import TokenDataset, open_dataset
from llmtrain.data.documents import document_samples
from llmtrain.data.mixture import max_entries_of, shares_of
from llmtrain.data.prepare import cache_path, describe_kept, prepare
from llmtrain.data.ready_made import check_separators
from llmtrain.data.sites import tokenizer_digest
from llmtrain.data.stream import shuffles_in_blocks
from llmtrain.data.text_list import check_token_files, sets_of, texts_of, with_tokenizer_of
from llmtrain.data.tokenizer import tokenizer_files, trained_size
from llmtrain.errors import DataError


def prepare_texts(
    recipe: Recipe, show_progress: bool, to_begin: bool = False, replicas: Iterable[int] | None = None
) -> dict[str, TokenDataset]:
    """Prepare the token shards of a recipe, including `eval.sets`, that do not exist yet. Return the training texts by
    name. The name of `data.source` is "". The texts of a list keep its names and order.

    With `to_begin`, a text that can be tokenized during training is prepared for the first step only. From `data.per_replica`,
    only the texts of the given `replicas` are prepared; None means all. A mixture's tokenizer is trained on its first text.
    Raises DataError if texts of a mixture have different tokenizers, or if the recipe needs separators that a text lacks.
    """
    texts = texts_of(recipe.data, replicas)
    check_token_files(recipe.data, texts)
    prepared: dict[str, TokenDataset] = {}
    for (name, section), tokens in zip(texts.items(), tokens_of(recipe, texts), strict=True):
        own = with_tokenizer_of(prepared.values(), section)
        prepared[name] = prepare(
            own,
            tokens,
            recipe.eval.tokens + 1,
            show_progress=show_progress,
            first_block_only=to_begin and shuffles_in_blocks(own),
        )
    if recipe.data.sources:
        _check_one_tokenizer(recipe.data.tokenizer, list(prepared.values()))
    if recipe.train.document_mask:
        for text in prepared.values():
            check_separators(text, "train.document_mask")
    first, *_ = prepared.values()
    sets = prepare_sets(recipe, first, show_progress)
    if recipe.data.packing == "none":  # now, because it takes a while, and later all ranks would wait for it
        check_separators(first, "data.packing")
        document_samples(first, "train", recipe.train.sequence_length)
        for text in (first, *sets.values()):
            document_samples(text, "validation", recipe.train.sequence_length)
    return prepared


def _check_one_tokenizer(name: str, texts: Sequence[TokenDataset]) -> None:
    """Raise DataError if texts were tokenized with different versions of a hub tokenizer. The folder names of texts do
    not distinguish these: they contain a digest of a local tokenizer's files, but only the name of a hub tokenizer."""
    if tokenizer_files(name) or trained_size(name) is not None:
        return
    first = tokenizer_digest(texts[0])
    for text in texts[1:]:
        if (other := tokenizer_digest(text)) != first:
            raise DataError(
                f"data.tokenizer: {text.directory} has a different version of {name} ({other}) than {texts[0].directory} ({first}); "
                "delete the older folder to prepare its text again"
            )


def tokens_of(recipe: Recipe, texts: Mapping[str, DataSection]) -> list[int]:
    """Return the number of training tokens that a run reads of each of `texts`, including the last label."""
    data, train = recipe.data, recipe.train
    sequences = train.total_steps * train.global_batch
    # A site's text is prepared for all sequences of the run, so that it suffices if the run continues with fewer sites.
    reads = [sequences] * len(texts)
    if data.sources:
        reads = [max_entries_of(share, sequences) for share in shares_of([entry.weight for entry in data.sources])]
    return [read * train.sequence_length + 1 for read in reads]


def prepare_sets(recipe: Recipe, prepared: TokenDataset, show_progress: bool) -> dict[str, TokenDataset]:
    """Return the texts of `eval.sets`, tokenized with the run's tokenizer. Raises DataError if one is too short to be validated."""
    sets = {
        name: prepare(section, 1, recipe.eval.tokens + 1, show_progress=show_progress)
        for name, section in sets_of(recipe.data, recipe.eval.sets, prepared).items()
    }
    for name, text in sets.items():
        check_set(recipe, name, text)
    return sets


def describe_kept_texts(data: DataSection) -> str:
    """Return a message for the user about what an interrupted preparation has kept of each text."""
    prepared: list[TokenDataset] = []
    kept = []
    for section in data.texts().values():
        own = with_tokenizer_of(prepared, section)
        kept.append(describe_kept(own))
        with suppress(DataError):
            prepared.append(open_dataset(cache_path(own)))
    return "; ".join(kept)
