"""Texts that a recipe names, and their checks: one `data.source`, or the entries of `data.sources` or `data.per_replica`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from llmtrain.config import DataSection
from llmtrain.config.data import HUB, LISTS
from llmtrain.data.dataset import TOKENIZER, TokenDataset
from llmtrain.data.mixture import BLOCK, shares_of
from llmtrain.data.python_files import PYTHON, STDLIB
from llmtrain.data.ready_made import find_ready_made
from llmtrain.data.sources import STORIES
from llmtrain.data.tokenizer import trained_size
from llmtrain.errors import DataError, RecipeError
from llmtrain.quantities import counted


def check_text_list(data: DataSection, sets: Mapping[str, str]) -> None:
    """Raise RecipeError unless exactly one of the keys names texts and its entries are compatible. `sets` is `eval.sets`."""
    for name, text in sets.items():
        if text.startswith(HUB) or text in (STORIES, STDLIB, PYTHON):
            raise RecipeError(f"eval.sets.{name} is {text}, expected a file or folder")
    trained_size(data.tokenizer)
    given = [key for key in ("source", *LISTS) if getattr(data, key)]
    if len(given) != 1:
        what = f"{' and '.join(f'data.{key}' for key in given)} are given" if given else "data.source is null"
        raise RecipeError(f"{what}, expected one of data.source, data.sources and data.per_replica, which name texts")
    if data.is_list and data.packing == "none":
        raise RecipeError(
            f"data.packing is none, which needs one text, but data.{given[0]} is a list; use packing=packed"
        )
    if data.is_list and data.shuffle == "blocks":
        raise RecipeError(
            f"data.shuffle is blocks, which needs one text, but data.{given[0]} is a list; use auto or all"
        )
    _check_names(data, sets)
    _check_weights(data)
    _check_validation(data)
    if data.per_replica and trained_size(data.tokenizer) is not None:
        raise RecipeError(
            f"data.tokenizer is {data.tokenizer}, but with data.per_replica each site would train another one; train it "
            "beforehand, and give its folder or file"
        )


def check_replicas(data: DataSection, replicas: int) -> None:
    """Raise RecipeError if the run has more replicas than entries of `data.per_replica`."""
    entries = len(data.per_replica)
    if data.per_replica and entries < replicas:
        raise RecipeError(
            f"data.per_replica has {entries} {'entry' if entries == 1 else 'entries'}, but the run has "
            f"{counted(replicas, 'replica')}; give one entry per replica (equal ones form a site), or parallel.replicas={entries}"
        )


def texts_of(data: DataSection, replicas: Iterable[int] | None = None) -> dict[str, DataSection]:
    """Return the section of each text, by the text's name. With `data.per_replica`, only the texts of the given `replicas` are
    returned, or all texts if `replicas` is None."""
    texts = data.texts()
    if not data.per_replica or replicas is None:
        return texts
    names = [data.per_replica[replica].name for replica in replicas if replica < len(data.per_replica)]
    return {name: texts[name] for name in dict.fromkeys(names)}


def sets_of(data: DataSection, sets: Mapping[str, str], prepared: TokenDataset) -> dict[str, DataSection]:
    """Return the section of each text of `eval.sets`, by the text's name, with the tokenizer of the run's first text. Only
    the validation split of such a text is read."""
    tokenizer, least = str(prepared.directory / TOKENIZER), {"max_tokens": 1, "sources": (), "per_replica": ()}
    return {
        name: data.model_copy(update={"source": text, "validation": text, "tokenizer": tokenizer, **least})
        for name, text in sets.items()
    }


def with_tokenizer_of(prepared: Iterable[TokenDataset], section: DataSection) -> DataSection:
    """Return a section of a mixture, with the tokenizer that was trained on the first of the `prepared` texts if the recipe asks
    for a trained one."""
    first = next(iter(prepared), None)
    if first is None or trained_size(section.tokenizer) is None:
        return section
    return section.model_copy(update={"tokenizer": str(first.directory / TOKENIZER)})


def key_of(data: DataSection, name: str) -> str:
    """Return the recipe key that gives the source of the text called `name`."""
    for key in LISTS:
        for number, entry in enumerate(getattr(data, key)):
            if entry.name == name:
                return f"data.{key}[{number}].source"
    return "data.source"


def check_token_files(data: DataSection, texts: Mapping[str, DataSection]) -> None:
    """Raise DataError, which names the recipe's key, for token files with wrong headers or with a tokenizer that is still to be
    trained. Call this before the first text is tokenized, because tokenizing may take hours."""
    for name, section in texts.items():
        with reported_as(key_of(data, name)):
            find_ready_made(section)


@contextmanager
def reported_as(key: str) -> Iterator[None]:
    """Replace `data.source` by the recipe's own key in the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data.source", key)) from None


def _check_names(data: DataSection, sets: Collection[str]) -> None:
    counted = Counter(entry.name for entry in data.sources)
    if twice := [name for name, count in counted.items() if count > 1]:
        raise RecipeError(f"data.sources: {counted[twice[0]]} entries are called {twice[0]}; give each its own name")
    sites = {entry.name: entry for entry in reversed(data.per_replica)}
    for number, entry in enumerate(data.per_replica):
        if entry != (first := sites[entry.name]):
            key = next(key for key in type(entry).model_fields if getattr(entry, key) != getattr(first, key))
            raise RecipeError(
                f"data.per_replica[{number}].{key} is {getattr(entry, key)!r}, but another entry called {entry.name} has "
                f"{getattr(first, key)!r}; give equal entries to replicas of one site, and names of their own to others"
            )
    if data.is_list and (both := [name for name in data.texts() if name in sets]):
        raise RecipeError(f"eval.sets.{both[0]} has the name of a training text; choose another name")


def _check_validation(data: DataSection) -> None:
    for name, section in data.texts().items():
        if section.validation == (section.split if section.source.startswith(HUB) else section.source):
            raise RecipeError(
                f"data.validation{f' of {name}' if name else ''} is {section.validation}, the text that is trained on; give another "
                "one, or leave it out to hold out data.validation_fraction of the documents"
            )


def _check_weights(data: DataSection) -> None:
    if not data.sources:
        return
    weights = [entry.weight for entry in data.sources]
    for entry, share in zip(data.sources, shares_of(weights), strict=True):
        if not share:
            least = sum(weights) / BLOCK
            raise RecipeError(
                f"data.sources: {entry.name} has weight {entry.weight:g} of {sum(weights):g}, too little for one sequence in "
                f"{BLOCK:,}; give at least {least:.3g}, or leave it out"
            )
