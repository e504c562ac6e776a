"""Texts that a rank reads (the run's only text, those of a mixture, or that of the rank's site), with their loader, validation
and summaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from llmtrain.config import DataSection, Recipe
from llmtrain.data.build_loader import build_loader, validation_batches
from llmtrain.data.checksum_scan import ChecksumScan
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.loader import BatchShape, Loader, count_windows
from llmtrain.data.mixture import BLOCK
from llmtrain.data.mixture_loader import MixtureLoader
from llmtrain.data.same_tokens import check_same_tokens
from llmtrain.data.sites import SiteLoader, Sites, SiteText, gather_sites, tokenizer_digest
from llmtrain.data.stream import first_block, shuffles_in_blocks
from llmtrain.data.text_identity import TextIdentity, check_continued
from llmtrain.errors import DataError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel.mesh import Mesh
from llmtrain.quantities import format_si
from llmtrain.reshard import FromAllRanks
from llmtrain.train.rank_errors import raise_on_all
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_length import is_fixed
from llmtrain.train.train_text import TrainText
from llmtrain.train.validation import Batches, ValidationSet, joined


def identities_of(recipe: Recipe, texts: Mapping[str, TokenDataset], is_growing: bool) -> dict[str, TextIdentity]:
    """Return the identity of each text by name. Of a text that grows, it is that of the part that every host has before the
    first step."""
    sections = recipe.data.texts()
    return {
        name: TextIdentity.of(first_block(text) if is_growing else text, not is_growing and is_fixed(sections[name]))
        for name, text in texts.items()
    }


def check_texts(directory: RunDirectory, texts: Mapping[str, TokenDataset]) -> None:
    """Raise DataError if one of the prepared `texts` is not the one that the run's newest checkpoint has stored: before ranks are
    started, which refuse it. Of a text that is not tokenized to its end, nothing is known yet."""
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
class RunTexts:
    """Training texts of a run on this rank, and their validation."""

    recipe: Recipe
    mesh: Mesh
    texts: Mapping[str, TokenDataset]
    """Texts that this rank reads, by name; "" is the only one of a run without a list of texts."""
    sets: Mapping[str, TokenDataset]
    """Texts of `eval.sets`, by name."""
    train_text: TrainText | None = None
    """Training text, if it grows while the run reads it."""
    sites: Sites | None = None
    """Sites of the run, if it has a text for each replica."""

    @classmethod
    def open(
        cls,
        recipe: Recipe,
        mesh: Mesh,
        texts: Mapping[str, TokenDataset],
        sets: Mapping[str, TokenDataset],
        train_text: TrainText | None = None,
    ) -> RunTexts:
        """Return the texts of this rank, after comparing them with those of other ranks. Raises DataError, on every rank, if
        they differ although they must be equal. A collective of all ranks."""
        there = texts if train_text is None else {name: first_block(text) for name, text in texts.items()}
        check_same_tokens(mesh, {**there, **sets})
        own = cls(recipe, mesh, texts, sets, train_text)
        return replace(own, sites=gather_sites(mesh, own._site_text())) if recipe.data.per_replica else own

    @property
    def all(self) -> dict[str, TokenDataset]:
        """Return all texts that this rank reads."""
        return {**self.texts, **self.sets}

    def scan(self) -> ChecksumScan:
        """Start checking this rank's share of its node's token shards for damage, in the background."""
        world = self.mesh.world
        if self.sites is None:
            return ChecksumScan(self.all.values(), world.local_rank, world.local_size)
        ranks = self.sites.node_ranks
        return ChecksumScan(self.all.values(), ranks.index(world.rank), len(ranks))

    def loader(self) -> Loader:
        """Return this rank's loader."""
        data, mesh = self.recipe.data, self.mesh
        shape = BatchShape.of(
            self.recipe,
            replica=mesh.replica_comms.rank,
            replicas=mesh.replicas,
            shard_rank=mesh.shard_comms.rank,
            shards=mesh.shard_comms.size,
        )
        if not data.is_list:
            growing = None if self.train_text is None else self.train_text.tokens
            return build_loader(self.recipe, self.texts[""], shape, tokens=growing)
        tokens = {name: text.tokens("train") for name, text in self.texts.items()}
        if data.per_replica:
            (own,) = tokens.values()
            return SiteLoader(own, self._site_of_replica(), shape)
        return MixtureLoader(tokens, [entry.weight for entry in data.sources], shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the identities of the training texts that this rank reads, for a checkpoint."""
        return {name: identity.state_dict() for name, identity in self._identities().items()}

    def reshard_rule(self) -> FromAllRanks:
        """Return the rule by which `state_dict` is resharded. It gives every rank the identities of all ranks' texts."""
        return FromAllRanks(lambda change, states: {name: own for state in states for name, own in state.items()})

    def check_continued(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise DataError, on every rank, if a rank's text is not the one that a checkpoint has stored. A collective of all
        ranks."""
        raise_on_all(self.mesh, lambda: check_continued(self._identities(), stored))

    def validation_sets(self) -> list[ValidationSet]:
        """Return the run's own text, which may have parts, then those of `eval.sets`."""
        if self.sites is not None:
            sites = self.sites.texts.values()
            most = max(site.batches for site in sites)
            own = joined([self._at_site(site, most) for site in sites])
        elif self.recipe.data.sources:
            weights = {entry.name: entry.weight for entry in self.recipe.data.sources}
            own = joined([replace(self._everywhere(name), share=weights[name]) for name in self.texts])
        else:
            own = self._everywhere("")
        return [own, *map(self._everywhere, self.sets)]

    def samples(self, loader: Loader) -> dict[str, int] | None:
        """Return the number of samples of each text of the run, by name; None while the text grows."""
        if self.sites is not None:
            return {name: site.samples for name, site in self.sites.texts.items()}
        if isinstance(loader, MixtureLoader):
            return loader.samples
        if self.train_text is None:
            return {"": loader.num_samples}
        # The loader counts what a growing text may have at most, even when it is complete. It refuses a text without samples.
        tokens = self.train_text.tokens
        samples = (len(tokens) - 1) // loader.sequence_length if tokens.is_complete else 0
        return {"": samples} if samples > 0 else None

    def describe(self, loader: Loader) -> list[str]:
        """Return the console's lines about the texts of a mixture or of sites."""
        train, samples = self.recipe.train, self.samples(loader)
        read = train.total_steps * train.global_batch
        if self.sites is not None:
            replicas = self._site_of_replica()
            shares = {name: replicas.count(name) / len(replicas) for name in samples}
            kind = "sites"
        elif isinstance(loader, MixtureLoader):
            shares = {name: share / BLOCK for name, share in zip(samples, loader.order.shares, strict=True)}
            kind = "mixture"
        else:
            return []
        parts = [
            f"{name} {100 * shares[name]:.3g}% ({format_si(number)} sequences, {read * shares[name] / number:.2f} epochs)"
            for name, number in samples.items()
        ]
        return [f"{kind}: {' · '.join(parts)}"]

    def summaries(
        self, loader: Loader, state: dict[str, Any], losses: Mapping[str, float]
    ) -> dict[str, dict[str, Any]]:
        """Return, by a text's name, what the run has read of it (`sequences`, `epochs`) and its last validation loss
        (`eval_loss`, from `losses`). Empty for a run without a list of texts. `state` is the loader's. A collective of
        all ranks."""
        if not self.recipe.data.is_list:
            return {}
        every = (
            self.mesh.all_ranks.all_gather_object(state, "counting sequences") if self.mesh.world.size > 1 else [state]
        )
        read = loader.read_by_text(every[:: self.mesh.shard_comms.size])
        samples = self.samples(loader)
        return {
            name: {
                "sequences": number,
                "epochs": round(number / samples[name], 4) if name in samples else None,
                "eval_loss": losses.get(name),
            }
            for name, number in read.items()
        }

    def _identities(self) -> dict[str, TextIdentity]:
        return identities_of(self.recipe, self.texts, is_growing=self.train_text is not None)

    def _site_of_replica(self) -> list[str]:
        return [entry.name for entry in self.recipe.data.per_replica[: self.mesh.replicas]]

    def _site_text(self) -> SiteText | DataError:
        """Return what other sites need to know of this rank's text, or the error for which this rank can't read it."""
        ((name, text),) = self.texts.items()
        train = self.recipe.train
        try:
            loader = self.loader()
            windows = count_windows(text.tokens("validation"), self.recipe.eval.tokens, train.sequence_length)
            digest = tokenizer_digest(text)
        except DataError as error:
            return error
        per_batch = self._site_of_replica().count(name) * self.mesh.shard_comms.size * train.micro_batch
        return SiteText(
            name=name,
            tokenizer=digest,
            samples=loader.num_samples,
            bytes_per_token=text.bytes_per_token("validation"),
            validated=windows * train.sequence_length,
            batches=-(-windows // per_batch),
        )

    def _everywhere(self, name: str) -> ValidationSet:
        """Return a text that all ranks validate together."""
        world = self.mesh.world
        return self._validation_set(name, self.all[name], world.rank, world.size)

    def _at_site(self, site: SiteText, batches: int) -> ValidationSet:
        """Return the text of a site, of which ranks at other sites have no batches. The site's own ranks have `batches`
        batches, the same number at every site, for engines whose forward passes wait for all ranks."""
        if site.name not in self.texts:
            return ValidationSet(site.name, tuple, site.bytes_per_token, share=site.validated)
        replicas, shards, replica = self._site_of_replica(), self.mesh.shard_comms, self.mesh.replica_comms.rank
        rank = replicas[:replica].count(site.name) * shards.size + shards.rank
        own = self._validation_set(site.name, self.texts[site.name], rank, replicas.count(site.name) * shards.size)
        return replace(own, batches=partial(_padded, own.batches, batches), share=site.validated)

    def _validation_set(self, name: str, text: TokenDataset, rank: int, world: int) -> ValidationSet:
        batches = validation_batches(self.recipe, text, rank=rank, world=world)
        return ValidationSet(name, batches, text.bytes_per_token("validation"))


def _padded(batches: Callable[[], Batches], count: int) -> Batches:
    """Yield the batches, then the inputs of the last one without labels until there are `count`."""
    given = 0
    inputs = torch.empty(0)
    for inputs, labels in batches():
        given += 1
        yield inputs, labels
    for _ in range(count - given):
        yield inputs, torch.full_like(inputs, IGNORE_INDEX)
