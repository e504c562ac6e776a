"""Separators between texts in training. A prompt should begin with the token that separated texts."""

from __future__ import annotations

from enum import Enum

from llmtrain.config import DataSection
from llmtrain.config.data import HUB
from llmtrain.data.dataset import read_index
from llmtrain.data.prepare import cache_path
from llmtrain.data.python_files import PYTHON, STDLIB
from llmtrain.data.sources import STORIES
from llmtrain.data.tokenizer import trained_size
from llmtrain.errors import DataError


class _Separators(Enum):
    """Origins of the separators between the training texts."""

    OURS = "llmtrain tokenized the text, and put eos after each document"
    EOS = "token files of another tool, in which eos occurs"
    NONE = "token files of another tool without eos"
    UNKNOWN = "the training data are not here"


def describe_separators(data: DataSection, eos: str) -> str:
    """Describe which tokens separated texts in training, and how a prompt should therefore begin."""
    found = {_separators_of(text) for text in data.texts().values()}
    begin = "begin a prompt with `tokenizer.eos_token_id`."
    if found == {_Separators.OURS}:
        return f"In training every text ended with {eos} and nothing else was added: {begin}"
    if found <= {_Separators.OURS, _Separators.EOS}:
        return f"In training {eos} was between texts, as in the token files that were read: {begin}"
    if _Separators.NONE in found:
        return (
            f"In training {'some' if len(found) > 1 else 'all'} texts were read from token files in which {eos} does not occur: "
            "texts followed each other without a separator, and the model may not know where one ends."
        )
    return f"In training {eos} was between texts, unless token files were read that lack it: {begin}"


def _separators_of(text: DataSection) -> _Separators:
    if (
        trained_size(text.tokenizer) is not None
        or text.source.startswith(HUB)
        or text.source in (STORIES, STDLIB, PYTHON)
    ):
        return _Separators.OURS  # token files are local, and need a tokenizer that exists
    try:
        ready_made = read_index(cache_path(text)).ready_made
    except DataError:
        return _Separators.UNKNOWN
    if ready_made is None:
        return _Separators.OURS
    return _Separators.EOS if ready_made.has_eos else _Separators.NONE
