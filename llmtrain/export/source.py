"""What is exported: a run directory, one of its checkpoints, and the tokenizer it was trained with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.config import Recipe
from llmtrain.data.index import TOKENIZER
from llmtrain.data.prepare import cache_path
from llmtrain.errors import CheckpointError, DataError
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.integrity import list_checkpoints, read_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclass(frozen=True)
class Source:
    """A checkpoint of a run."""

    run: Path
    step: int
    checkpoint: Path
    recipe: Recipe

    @cached_property
    def state(self) -> dict[str, Any]:
        """The checkpoint's state.json."""
        return read_state(self.checkpoint)

    @cached_property
    def digest(self) -> str:
        """What tells this checkpoint from any other, also from one of the same step of a run trained anew."""
        return hashlib.sha256((self.checkpoint / "state.json").read_bytes()).hexdigest()

    @property
    def tokens(self) -> int:
        """Training tokens of all replicas up to here."""
        return sum(rank["predicted_tokens"] for rank in self.state["ranks"])

    @cached_property
    def tokenizer_folder(self) -> Path:
        """The run's copy of its tokenizer or, in a run that has none, the one beside its data. Raises DataError if neither
        is there (any more)."""
        copy, data = self.run / TOKENIZER, self.recipe.data
        if (copy / TOKENIZER_CONFIG).is_file():
            return copy
        remedy = f"export where the run was trained, or prepare its data again: python -m llmtrain prepare {self.run}/recipe.yaml"
        try:
            path = cache_path(data) / TOKENIZER
        except DataError as error:
            raise DataError(f"the tokenizer of {self.run} can't be found ({error}); {remedy}") from None
        if not (path / TOKENIZER_CONFIG).is_file():
            raise DataError(
                f"the tokenizer of {self.run} is neither in {copy} nor in {path} (data.cache_dir={data.cache_dir}); {remedy}"
            )
        return path

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that made the training tokens."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer_folder)


def find_source(run: Path, step: int | None = None) -> Source:
    """The checkpoint of `run` after `step`, or the newest. Raises CheckpointError, saying what there is."""
    if not (run / "recipe.yaml").is_file():
        what = "is not a run directory (it has no recipe.yaml)" if run.is_dir() else "does not exist"
        raise CheckpointError(f"{run} {what}; give one that training made, such as runs/quickstart")
    there = dict(list_checkpoints(run / "checkpoints"))
    if not there:
        raise CheckpointError(f"{run} has no complete checkpoint; train it until it writes one (checkpoint.every)")
    if step is None:
        step = max(there)
    if step not in there:
        steps = ", ".join(str(known) for known in there)
        raise CheckpointError(f"{run} has no checkpoint of step {step}; there are: {steps}")
    return Source(run, step, there[step], load_recipe(run / "recipe.yaml"))
