"""A text per replica (`data.per_replica`): which replicas form a site, and what each site has read of its text.

Replicas whose entries have the same name form a site. A site has its own endless list of samples, of which its replicas
read parts. Its cursor is stored under its name: after a restart with other replicas or other entries, each site
continues where it stopped. The checkpoint keeps the cursors of sites that currently have no replica.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.dataset import TOKENIZER, TokenDataset, TokenShards
from llmtrain.data.loader import Loader, SamplesBefore
from llmtrain.data.order import SampleCursor, merge_cursors, resize
from llmtrain.errors import DataError
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.world import node_name
from llmtrain.reshard import MeshChange


class SiteLoader(Loader):
    """Loader of batches from the text of this rank's site. A replica reads as many sequences per step as if all replicas shared one
    text."""

    def __init__(self, tokens: TokenShards, sites: Sequence[str], shape: BatchShape) -> None:
        """Take the `shape` of the run; the loader itself has the shape of the site. `sites` has the name of each replica's site.
        Raises DataError if the text is shorter than one step of its site."""
        self.sites, self.site = list(sites), sites[shape.replica]
        self.absent: dict[str, dict[str, Any]] = {}
        """States of sites that currently have no replica, by name."""
        self._run = shape
        try:
            super().__init__(tokens, _at_site(shape, sites))
        except DataError as error:
            raise DataError(f"{self.site}: {error}".replace("data.source", "data.per_replica")) from None
        self.mean_replica_tokens = shape.global_batch * shape.sequence_length / shape.replicas
        self.relative_part = shape.relative_part

    def state_dict(self) -> dict[str, Any]:
        absent = {"absent": self.absent} if self.absent else {}
        # Store the size even if it never changed: the run's length may change while the site has no replica.
        return super().state_dict() | {"sizes": self.order.sizes, "site": self.site} | absent

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(resize(state, self.num_samples, self.num_samples))
        self.absent = state.get("absent", {})

    def state_for_length(self, state: dict[str, Any], before: SamplesBefore) -> dict[str, Any]:
        """Convert the `state` of a run of another length to a state of this run. `before` returns the number of samples that a text
        had in that run."""
        return resize(state, before(self.site, self.num_samples, lambda entries: entries), self.num_samples)

    def read_by_text(self, states: Sequence[dict[str, Any]]) -> dict[str, int]:
        """Return the number of sequences that a run has read at each site, by the site's name. `states` has the loader's
        state of each replica."""
        read = {}
        for site, state in self._by_site(states, self._run.global_batch).items():
            cursor = SampleCursor()
            cursor.load_state_dict(state)
            read[site] = cursor.num_read
        return read

    def _reshard(self, change: MeshChange, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the state with which this rank's site continues where its replicas stopped."""
        states, old_batch = ranks[:: change.old_shards], change.old_global_batch
        if not change.replicas_changed and old_batch is None and self._has_parts_of(states):
            return states[change.replica]
        cursors = self._by_site(states, old_batch or self._run.global_batch)
        absent = {site: state for site, state in cursors.items() if site not in self.sites}
        mine = cursors.get(self.site, SampleCursor().state_dict()) | {"site": self.site}
        return mine | ({"absent": absent} if absent else {})

    def _has_parts_of(self, states: Sequence[dict[str, Any]]) -> bool:
        """Return whether the replicas with these `states` had the sites and the parts that this run's replicas have."""
        shapes = (_at_site(replace(self._run, replica=number), self.sites) for number in range(len(self.sites)))
        mine = [{"site": site, **shape.state_dict()} for site, shape in zip(self.sites, shapes, strict=True)]
        return mine == [{key: state[key] for key in ("site", "part") if key in state} for state in states]

    @staticmethod
    def _by_site(states: Sequence[dict[str, Any]], run_batch: int) -> dict[str, dict[str, Any]]:
        """Return the state of each site, given the state of each replica of one run and the run's global batch."""
        by_site: dict[str, list[dict[str, Any]]] = {}
        for state in states:
            by_site.setdefault(state["site"], []).append(state)
        merged = {
            site: merge_cursors(members, _site_batch(run_batch, len(members), len(states)))
            for site, members in by_site.items()
        }
        return states[0].get("absent", {}) | merged


def _at_site(shape: BatchShape, sites: Sequence[str]) -> BatchShape:
    """Return a replica's shape among the replicas of its site, given its shape in the run and each replica's site."""
    own = [number for number, site in enumerate(sites) if site == sites[shape.replica]]
    return replace(
        shape,
        global_batch=sum(len(replace(shape, replica=number).part) for number in own),
        replica=own.index(shape.replica),
        replicas=len(own),
        shares=tuple(shape.shares[number] for number in own) if shape.shares else (),
    )


def _site_batch(run_batch: int, members: int, replicas: int) -> int:
    """Return the sequences per step of a site that has `members` of the run's `replicas`, if all replicas have equal parts."""
    return run_batch // replicas * members


def check_site(tokens: TokenShards, sites: Sequence[str], site: str, shape: BatchShape) -> None:
    """Raise DataError if the text of `site` is shorter than one step of that site. `sites` has the name of each replica's
    site, and `shape` is the shape of any rank."""
    SiteLoader(tokens, sites, replace(shape, replica=sites.index(site)))


@dataclass(frozen=True)
class SiteText:
    """Description of a site's text, which the sites exchange."""

    name: str
    tokenizer: str
    """Digest of the tokenizer that produced the tokens."""
    samples: int
    bytes_per_token: float
    """UTF-8 bytes of the validation text divided by its tokens."""
    validated: int
    """Number of validation tokens."""
    batches: int
    """Number of validation batches per rank of the site."""


@dataclass(frozen=True)
class Sites:
    """Sites of a run."""

    texts: Mapping[str, SiteText]
    """Text of each site, in the order of its first replica."""
    node_ranks: Sequence[int]
    """Ranks of this rank's site on its node."""


def gather_sites(mesh: Mesh, mine: SiteText | DataError) -> Sites:
    """Return the sites of the run. `mine` is the text of this rank's site, or the error if it can't be read. Raises DataError,
    on every rank, if a rank's text can't be read, or if sites have different tokenizers. A collective of all ranks."""
    here = node_name(), mine
    of_ranks = mesh.all_ranks.all_gather_object(here, "comparing sites") if mesh.world.size > 1 else [here]
    for rank, (node, text) in enumerate(of_ranks):
        if isinstance(text, DataError):
            raise DataError(f"{text} (rank {rank} on {node})")
    first, texts = of_ranks[0][1], {}
    for rank, (_, text) in enumerate(of_ranks):
        if text.tokenizer != first.tokenizer:
            raise DataError(
                f"data.tokenizer: rank {rank} at {text.name} has a different tokenizer ({text.tokenizer}) than rank 0 at {first.name} "
                f"({first.tokenizer}); give all sites the same files, and prepare again"
            )
        texts.setdefault(text.name, text)
    own = (node_name(), mine.name)
    return Sites(texts, [rank for rank, (node, text) in enumerate(of_ranks) if (node, text.name) == own])


def tokenizer_digest(prepared: TokenDataset) -> str:
    """Return a digest of the tokenizer that produced the tokens. The digest does not depend on the formatting of tokenizer.json. It
    covers the eos token, because base and chat versions of a tokenizer may have the same tokenizer.json and different eos tokens."""
    folder = prepared.directory / TOKENIZER
    try:
        content = json.dumps(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), sort_keys=True)
    except (OSError, ValueError):  # another kind of tokenizer
        content = json.dumps(prepared.load_tokenizer().get_vocab(), sort_keys=True)
    return hashlib.sha256(f"{prepared.vocab_size} {prepared.eos_id} {content}".encode()).hexdigest()[:8]
