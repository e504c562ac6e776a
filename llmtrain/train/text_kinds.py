"""Kinds of training texts that a run can have: a single one, a mixture, or one for each site."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from llmtrain.config import Recipe
from llmtrain.data.batch_shape import relative_parts
from llmtrain.data.build_loader import build_loader
from llmtrain.data.checksum_scan import ChecksumScan
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.loader import Loader, count_windows
from llmtrain.data.mixture import BLOCK
from llmtrain.data.mixture_loader import MixtureLoader
from llmtrain.data.same_tokens import check_same_tokens
from llmtrain.data.sites import SiteLoader, Sites, SiteText, gather_sites, tokenizer_digest
from llmtrain.data.stream import first_block
from llmtrain.data.text_identity import TextIdentity
from llmtrain.errors import DataError
from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel.mesh import Mesh
from llmtrain.quantities import format_si
from llmtrain.train.run_texts import RunTexts, batch_shape, identities_of
from llmtrain.train.train_text import TrainText
from llmtrain.train.validation import Batches, ValidationSet, joined


def open_texts(
    recipe: Recipe,
    mesh: Mesh,
    texts: Mapping[str, TokenDataset],
    sets: Mapping[str, TokenDataset],
    train_text: TrainText | None = None,
) -> RunTexts:
    """Return the texts of this rank, after comparing them with those of other ranks. `texts` and `sets` are as in
    `RunTexts`; `train_text` is the training text if it may grow while the run reads it. Raises DataError, on every
    rank, if texts that must be equal differ. A collective of all ranks."""
    there = texts if train_text is None else {name: first_block(text) for name, text in texts.items()}
    check_same_tokens(mesh, {**there, **sets})
    if recipe.data.per_replica:
        return SiteTexts(recipe, mesh, texts, sets, gather_sites(mesh, _site_text(recipe, mesh, texts)))
    if recipe.data.sources:
        return MixtureTexts(recipe, mesh, texts, sets)
    return SingleText(recipe, mesh, texts, sets, train_text)


@dataclass(frozen=True)
class SingleText(RunTexts):
    """The only text of a run. Each rank reads its part of it."""

    train_text: TrainText | None = None
    """Training text, if it grows while the run reads it."""

    def loader(self) -> Loader:
        growing = None if self.train_text is None else self.train_text.tokens
        return build_loader(self.recipe, self.texts[""], batch_shape(self.recipe, self.mesh), tokens=growing)

    def own_validation(self) -> ValidationSet:
        return self.validated_by_all("")

    def samples(self, loader: Loader) -> dict[str, int] | None:
        if self.train_text is None:
            return {"": loader.num_samples}
        # For a growing text, the loader's count is an upper bound, even once the text is complete. The loader refuses a
        # complete text without samples.
        tokens = self.train_text.tokens
        samples = (len(tokens) - 1) // loader.sequence_length if tokens.is_complete else 0
        return {"": samples} if samples > 0 else None

    def identities(self) -> dict[str, TextIdentity]:
        return identities_of(self.recipe, self.texts, is_growing=self.train_text is not None)


class ListedTexts(RunTexts):
    """Texts of a run whose recipe has a list of texts."""

    kind: ClassVar[str]
    """Name of the kind on the console."""

    @abstractmethod
    def shares(self, loader: Loader) -> dict[str, float]:
        """Return each text's share of the sequences that the run reads, by name."""

    def describe(self, loader: Loader) -> list[str]:
        train, shares = self.recipe.train, self.shares(loader)
        read = train.total_steps * train.global_batch
        parts = [
            f"{name} {100 * shares[name]:.3g}% ({format_si(number)} sequences, {read * shares[name] / number:.2f} epochs)"
            for name, number in self.samples(loader).items()
        ]
        return [f"{self.kind}: {' · '.join(parts)}"]

    def summaries(
        self, loader: Loader, state: dict[str, Any], losses: Mapping[str, float]
    ) -> dict[str, dict[str, Any]]:
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


@dataclass(frozen=True)
class MixtureTexts(ListedTexts):
    """Texts of a mixture. Every rank reads its part of the mixture, in which each text has a share by its weight."""

    kind = "mixture"

    def loader(self) -> Loader:
        tokens = {name: text.tokens("train") for name, text in self.texts.items()}
        weights = [entry.weight for entry in self.recipe.data.sources]
        return MixtureLoader(tokens, weights, batch_shape(self.recipe, self.mesh))

    def own_validation(self) -> ValidationSet:
        weights = {entry.name: entry.weight for entry in self.recipe.data.sources}
        return joined([replace(self.validated_by_all(name), share=weights[name]) for name in self.texts])

    def samples(self, loader: Loader) -> dict[str, int]:
        return loader.samples

    def shares(self, loader: Loader) -> dict[str, float]:
        return {name: share / BLOCK for name, share in zip(loader.samples, loader.order.shares, strict=True)}


@dataclass(frozen=True)
class SiteTexts(ListedTexts):
    """Texts of a run's sites. This rank has only the text of its own site."""

    sites: Sites
    kind = "sites"

    def loader(self) -> Loader:
        return _site_loader(self.recipe, self.mesh, self.texts)

    def own_validation(self) -> ValidationSet:
        sites = self.sites.texts.values()
        most = max(site.batches for site in sites)
        return joined([self._at_site(site, most) for site in sites])

    def samples(self, loader: Loader) -> dict[str, int]:
        return {name: site.samples for name, site in self.sites.texts.items()}

    def shares(self, loader: Loader) -> dict[str, float]:
        replicas = _site_of_replica(self.recipe, self.mesh)
        parts = relative_parts(self.recipe.train.batch_shares, len(replicas))
        return {
            name: sum(part for part, site in zip(parts, replicas, strict=True) if site == name) / len(replicas)
            for name in self.sites.texts
        }

    def scan(self) -> ChecksumScan:
        ranks = self.sites.node_ranks
        return ChecksumScan(self.all_texts.values(), ranks.index(self.mesh.world.rank), len(ranks))

    def _at_site(self, site: SiteText, batches: int) -> ValidationSet:
        """Return the text of a site. Ranks at other sites have no batches of it. The site's own ranks have `batches` batches, the
        same number at every site, because the forward passes of some engines wait for all ranks."""
        if site.name not in self.texts:
            return ValidationSet(site.name, tuple, site.bytes_per_token, share=site.validated)
        replicas, shards = _site_of_replica(self.recipe, self.mesh), self.mesh.shard_comms
        rank = replicas[: self.mesh.replica_comms.rank].count(site.name) * shards.size + shards.rank
        own = self.validated_by(site.name, self.texts[site.name], rank, replicas.count(site.name) * shards.size)
        return replace(own, batches=partial(_padded, own.batches, batches), share=site.validated)


def _site_of_replica(recipe: Recipe, mesh: Mesh) -> list[str]:
    return [entry.name for entry in recipe.data.per_replica[: mesh.replicas]]


def _site_loader(recipe: Recipe, mesh: Mesh, texts: Mapping[str, TokenDataset]) -> SiteLoader:
    (own,) = texts.values()
    return SiteLoader(own.tokens("train"), _site_of_replica(recipe, mesh), batch_shape(recipe, mesh))


def _site_text(recipe: Recipe, mesh: Mesh, texts: Mapping[str, TokenDataset]) -> SiteText | DataError:
    """Return what other sites need to know about this rank's text, or the error that keeps this rank from reading it."""
    ((name, text),) = texts.items()
    train = recipe.train
    try:
        loader = _site_loader(recipe, mesh, texts)
        windows = count_windows(text.tokens("validation"), recipe.eval.tokens, train.sequence_length)
        digest = tokenizer_digest(text)
    except DataError as error:
        return error
    per_batch = _site_of_replica(recipe, mesh).count(name) * mesh.shard_comms.size * train.micro_batch
    return SiteText(
        name=name,
        tokenizer=digest,
        samples=loader.num_samples,
        bytes_per_token=text.bytes_per_token("validation"),
        validated=windows * train.sequence_length,
        batches=-(-windows // per_batch),
    )


def _padded(batches: Callable[[], Batches], count: int) -> Batches:
    """Yield the batches, then the inputs of the last one without labels until there are `count`."""
    given = 0
    inputs = torch.empty(0)
    for inputs, labels in batches():
        given += 1
        yield inputs, labels
    for _ in range(count - given):
        yield inputs, torch.full_like(inputs, IGNORE_INDEX)
