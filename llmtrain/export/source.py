"""Source of an export: a run directory, one of its checkpoints, and its tokenizer."""

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
    """Checkpoint of a run, with the recipe."""

    run: Path
    step: int
    checkpoint: Path
    recipe: Recipe

    @cached_property
    def state(self) -> dict[str, Any]:
        """Return the contents of the checkpoint's state.json."""
        return read_state(self.checkpoint)

    @cached_property
    def digest(self) -> str:
        """Return a digest unique to this checkpoint. Training the run again changes the digest of every step."""
        return hashlib.sha256((self.checkpoint / "state.json").read_bytes()).hexdigest()

    @property
    def tokens(self) -> int:
        """Return the training tokens of all replicas up to this checkpoint."""
        return sum(rank["predicted_tokens"] for rank in self.state["ranks"])

    @cached_property
    def tokenizer_folder(self) -> Path:
        """Return the folder of the run's copy of its tokenizer or, if the run has none, the one in the data cache.

        Raises DataError if neither exists.
        """
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
        """Load the tokenizer that produced the training tokens."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer_folder)


def find_source(run: Path, step: int | None = None) -> Source:
    """Return the checkpoint of `run` after `step`, or the newest.

    Raises CheckpointError if it does not exist; the message lists the available steps.
    """
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
