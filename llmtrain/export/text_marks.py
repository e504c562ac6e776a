"""What was between the texts of training, and so belongs before a prompt."""

from __future__ import annotations

from enum import Enum

from llmtrain.config import DataSection
from llmtrain.data.dataset import read_index
from llmtrain.data.prepare import cache_path
from llmtrain.data.python_files import PYTHON, STDLIB
from llmtrain.data.sources import HUB, STORIES
from llmtrain.data.tokenizer import trained_size
from llmtrain.errors import DataError


class _Marks(Enum):
    """Where the marks between the training texts come from."""

    OURS = "llmtrain tokenized the text, and put eos after each document"
    EOS = "token files of another tool, in which eos occurs"
    NONE = "token files of another tool without eos"
    UNKNOWN = "the training data are not here"


def describe_marks(data: DataSection, eos: str) -> str:
    """Return which tokens were between texts in training, and how a prompt therefore begins."""
    found = {_marks_of(text) for text in data.texts().values()}
    begin = "begin a prompt with `tokenizer.eos_token_id`."
    if found == {_Marks.OURS}:
        return f"In training every text ended with {eos} and nothing else was added: {begin}"
    if found <= {_Marks.OURS, _Marks.EOS}:
        return f"In training {eos} was between texts, as in the token files that were read: {begin}"
    if _Marks.NONE in found:
        return (
            f"In training {'some' if len(found) > 1 else 'all'} texts were read from token files in which {eos} does not occur: "
            "texts followed each other without a mark, and the model may not know where one ends."
        )
    return f"In training {eos} was between texts, unless token files were read that lack it: {begin}"


def _marks_of(text: DataSection) -> _Marks:
    if (
        trained_size(text.tokenizer) is not None
        or text.source.startswith(HUB)
        or text.source in (STORIES, STDLIB, PYTHON)
    ):
        return _Marks.OURS  # token files name the tokenizer that made them
    try:
        ready_made = read_index(cache_path(text)).ready_made
    except DataError:
        return _Marks.UNKNOWN
    if ready_made is None:
        return _Marks.OURS
    return _Marks.EOS if ready_made.has_eos else _Marks.NONE
