"""Source of an export: one of a run's checkpoints, its tokenizer, and the chosen weights (the replicas' mean, the anchor,
or one replica's parameters)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from llmtrain.config import Recipe
from llmtrain.data.dataset import TOKENIZER
from llmtrain.data.prepare import cache_path
from llmtrain.data.tokenizer import read_tokenizer
from llmtrain.errors import CheckpointError, DataError, UserError
from llmtrain.export.request import Step, WeightSource, choose_step
from llmtrain.model import PREFIX, LanguageModel
from llmtrain.recipe_loader import load_recipe, stored_recipe
from llmtrain.run_files import CHECKPOINTS, RECIPE, STATE_FILE, step_name
from llmtrain.train.checkpoint_files import find_corruption, read_state
from llmtrain.train.checkpoint_reader import FullTensorReader
from llmtrain.train.run_dir import recipe_changes
from llmtrain.train.stored_weights import StoredWeights, validated_weights, weights_of_replicas

TOKENIZER_CONFIG, TOKENIZER_FILE = "tokenizer_config.json", "tokenizer.json"
OTHER = "export another with --step"
REMEDY = f"copy the checkpoint again, or {OTHER}"


@dataclass(frozen=True)
class Source:
    """Checkpoint of a run, with the run's recipe."""

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
        return hashlib.sha256((self.checkpoint / STATE_FILE).read_bytes()).hexdigest()

    def check_digests(self) -> None:
        """Raise CheckpointError unless every file of the checkpoint is what training wrote."""
        if found := find_corruption(self.checkpoint, self.state["files"]):
            raise CheckpointError(f"{self.checkpoint} is damaged: {found}; {REMEDY}")

    def open_tensors(self) -> FullTensorReader:
        """Open the checkpoint's tensors. Raises CheckpointError if its metadata is damaged."""
        return FullTensorReader(self.checkpoint, REMEDY, OTHER)

    def check_recipe(self) -> None:
        """Raise CheckpointError if a run of another recipe wrote the checkpoint, even if the model is the same."""
        there = stored_recipe(self.state["recipe"], str(self.checkpoint))
        if changed := recipe_changes(there, self.recipe):
            raise CheckpointError(
                f"{self.checkpoint} is of another recipe than {self.run}/recipe.yaml ({'; '.join(changed)}); put back the "
                "recipe.yaml that it was trained with"
            )

    @property
    def tokens(self) -> int:
        """Return the number of training tokens of all replicas up to this checkpoint."""
        return sum(rank["predicted_tokens"] for rank in self.state["ranks"])

    @cached_property
    def tokenizer_folder(self) -> Path:
        """Return the folder with the run's copy of its tokenizer or, if the run has no copy, the folder in the data cache.

        Raises DataError if neither exists.
        """
        copy, data = self.run / TOKENIZER, self.recipe.data
        if (copy / TOKENIZER_CONFIG).is_file():
            return copy
        remedy = f"export where the run was trained, or prepare its data again: llmtrain prepare {self.run}/recipe.yaml"
        try:
            path = cache_path(next(iter(data.texts().values()))) / TOKENIZER  # all texts have one tokenizer
        except DataError as error:
            raise DataError(f"the tokenizer of {self.run} can't be found ({error}); {remedy}") from None
        if not (path / TOKENIZER_CONFIG).is_file():
            raise DataError(
                f"the tokenizer of {self.run} is neither in {copy} nor in {path} (data.cache_dir={data.cache_dir}); {remedy}"
            )
        return path

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that produced the training tokens. As in training, it encodes a special token that a text spells
        out as ordinary text.

        Raises DataError if its files are damaged.
        """
        folder, remedy = self.tokenizer_folder, "copy it again from where the run was trained"
        return read_tokenizer(
            folder,
            lambda why: DataError(f"the tokenizer in {folder} can't be read ({why}); {remedy}"),
            try_out=True,
            split_special_tokens=True,
        )


def find_source(run: Path, step: Step | None = None) -> Source:
    """Return the checkpoint of `run` after `step`, the best checkpoint, or by default the newest.

    Raises CheckpointError if it does not exist; the message lists the available steps.
    """
    step = choose_step(run, step)
    return Source(run, step, run / CHECKPOINTS / step_name(step), load_recipe(run / RECIPE))


class ChosenWeights(StoredWeights):
    """Weights of the exported model by transformers' names, read one at a time in fp32."""

    def __init__(self, stored: FullTensorReader, state: dict[str, Any], choice: WeightSource):
        """Open the weights; `state` is the checkpoint's state.json.

        Raises UserError if the checkpoint has no such weights.
        """
        replicas = state["mesh"][0]
        if choice.kind == "anchor" and not state["shared"]["anchor"]:
            raise UserError(
                f"--weights anchor: {stored.path} has no anchor (the method keeps none, or no round has begun); use mean"
            )
        if choice.replica is not None and choice.replica >= replicas:
            there = "replica:0" if replicas == 1 else f"replica:0 to replica:{replicas - 1}"
            raise UserError(f"--weights {choice}: {stored.path} has {there}")
        prefixes = ["anchor."] if choice.kind == "anchor" else validated_weights(state)
        super().__init__(stored, prefixes if choice.replica is None else weights_of_replicas([choice.replica]))

    def check_model(self, model: LanguageModel) -> None:
        """Raise CheckpointError unless the names and shapes of the weights are those of `model`."""
        expected = {name.removeprefix(PREFIX): p.shape for name, p in model.named_parameters()}
        for name in sorted(expected.keys() | self.shapes.keys()):
            there, here = (list(shapes[name]) if name in shapes else "none" for shapes in (self.shapes, expected))
            if there != here:
                raise CheckpointError(
                    f"{self.stored.path} is of another model than the run's recipe.yaml: {name} is {there} there, "
                    f"{here} by the recipe; put back the recipe.yaml that it was trained with"
                )
