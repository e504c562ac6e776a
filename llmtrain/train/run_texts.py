"""Texts that a rank reads, with their loader, validation and summaries: the part that all kinds of texts have in
common. Also a check of prepared texts against a run's checkpoint."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmtrain.config import DataSection, Recipe
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.build_loader import validation_batches
from llmtrain.data.checksum_scan import ChecksumScan
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.loader import Loader
from llmtrain.data.stream import first_block, shuffles_in_blocks
from llmtrain.data.text_identity import TextIdentity, check_continued
from llmtrain.parallel.mesh import Mesh
from llmtrain.reshard import FromAllRanks
from llmtrain.train.rank_errors import raise_on_all
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_length import is_fixed
from llmtrain.train.validation import ValidationSet


def identities_of(recipe: Recipe, texts: Mapping[str, TokenDataset], is_growing: bool) -> dict[str, TextIdentity]:
    """Return the identity of each text by name. A growing text is identified by the part that every host has before the
    first step."""
    sections = recipe.data.texts()
    return {
        name: TextIdentity.of(first_block(text) if is_growing else text, not is_growing and is_fixed(sections[name]))
        for name, text in texts.items()
    }


def check_texts(directory: RunDirectory, texts: Mapping[str, TokenDataset]) -> None:
    """Raise DataError if one of the prepared `texts` differs from the one that the run's newest checkpoint has stored.
    Ranks would refuse it, too, but this check precedes their start. A text that is the same in runs of all lengths is
    skipped until it is tokenized to its end."""
    recipe, state = directory.recipe, directory.newest_state()
    if state is None:
        return
    sections = recipe.data.texts()
    known = {
        name: text for name, text in texts.items() if not is_fixed(sections[name]) or is_complete(text, sections[name])
    }
    stored = {name: identity for rank in state["ranks"] for name, identity in rank["texts"].items()}
    check_continued(identities_of(recipe, known, is_growing=shuffles_in_blocks(recipe.data)), stored)


def is_complete(text: TokenDataset, data: DataSection) -> bool:
    """Return whether the prepared training tokens suffice for a run of any length."""
    train = text.index.splits["train"]
    return train.exhausted or train.tokens >= (data.max_tokens or math.inf)


@dataclass(frozen=True)
class RunTexts(ABC):
    """Training texts of a run on this rank, and their validation."""

    recipe: Recipe
    mesh: Mesh
    texts: Mapping[str, TokenDataset]
    """Texts that this rank reads, by name. A run without a list of texts has one, named ""."""
    sets: Mapping[str, TokenDataset]
    """Texts of `eval.sets`, by name."""

    @abstractmethod
    def loader(self) -> Loader:
        """Return this rank's loader."""

    @abstractmethod
    def own_validation(self) -> ValidationSet:
        """Return the run's own validation text, which may have parts."""

    @abstractmethod
    def samples(self, loader: Loader) -> dict[str, int] | None:
        """Return the number of samples of each text of the run, by name; None while the text grows."""

    def describe(self, loader: Loader) -> list[str]:
        """Return the console's lines about a list of texts; empty for a run without one."""
        return []

    def summaries(
        self, loader: Loader, state: dict[str, Any], losses: Mapping[str, float]
    ) -> dict[str, dict[str, Any]]:
        """Return, by a text's name, what the run has read of it (`sequences`, `epochs`) and its last validation loss
        (`eval_loss`, from `losses`). Empty for a run without a list of texts. `state` is the loader's. A collective of
        all ranks."""
        return {}

    def scan(self) -> ChecksumScan:
        """Start checking this rank's share of its node's token shards for damage, in the background."""
        world = self.mesh.world
        return ChecksumScan(self.all_texts.values(), world.local_rank, world.local_size)

    @property
    def all_texts(self) -> dict[str, TokenDataset]:
        """Return all texts that this rank reads."""
        return {**self.texts, **self.sets}

    def validation_sets(self) -> list[ValidationSet]:
        """Return the run's own text, then those of `eval.sets`."""
        return [self.own_validation(), *map(self.validated_by_all, self.sets)]

    def state_dict(self) -> dict[str, Any]:
        """Return the identities of the training texts that this rank reads, for a checkpoint."""
        return {name: identity.state_dict() for name, identity in self.identities().items()}

    def reshard_rule(self) -> FromAllRanks:
        """Return the rule by which `state_dict` is resharded. It gives every rank the identities of all ranks' texts."""
        return FromAllRanks(lambda change, states: {name: own for state in states for name, own in state.items()})

    def check_continued(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise DataError, on every rank, if a rank's text is not the one that a checkpoint has stored. A collective of all
        ranks."""
        raise_on_all(self.mesh, lambda: check_continued(self.identities(), stored))

    # -- for subclasses ------------------------------------------------------------------------------------------

    def identities(self) -> dict[str, TextIdentity]:
        """Return the identity of each training text that this rank reads, by name."""
        return identities_of(self.recipe, self.texts, is_growing=False)

    def validated_by_all(self, name: str) -> ValidationSet:
        """Return a text that all ranks validate together."""
        world = self.mesh.world
        return self.validated_by(name, self.all_texts[name], world.rank, world.size)

    def validated_by(self, name: str, text: TokenDataset, rank: int, world: int) -> ValidationSet:
        """Return a text that `world` ranks validate together. This rank is number `rank` among them."""
        batches = validation_batches(self.recipe, text, rank=rank, world=world)
        return ValidationSet(name, batches, text.bytes_per_token("validation"))


def batch_shape(recipe: Recipe, mesh: Mesh) -> BatchShape:
    """Return the shape of this rank's batches."""
    return BatchShape.of(
        recipe,
        replica=mesh.replica_comms.rank,
        replicas=mesh.replicas,
        shard_rank=mesh.shard_comms.rank,
        shards=mesh.shard_comms.size,
    )
