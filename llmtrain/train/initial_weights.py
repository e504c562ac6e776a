"""Weights that a new run starts from (`model.from_weights`): compared with the recipe's model, and verified on every node.

A run that continues from its own checkpoint does not read these weights, but keeps a record of them.
"""

from __future__ import annotations

import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from llmtrain.config import Recipe
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.tokenizer import existing_tokenizer, read_tokenizer, trained_size, vocab_size
from llmtrain.errors import CheckpointError, ModelError, UserError, one_line
from llmtrain.files import is_bare_file_name, local_path
from llmtrain.model import LanguageModel, build, model_config
from llmtrain.parallel.mesh import Mesh
from llmtrain.pretrained import KEY, Pretrained, check_architecture, find_pretrained, pretrained_config
from llmtrain.run_files import EXPORT_MANIFEST, checkpoint_folders
from llmtrain.train.checkpoint_files import (
    Digest,
    digests,
    read_state,
)
from llmtrain.train.checkpoint_reader import FullTensorReader
from llmtrain.train.mirror import has_mirrored_checkpoint
from llmtrain.train.rank_errors import raise_on_all
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.safetensors_reader import SafetensorsReader
from llmtrain.train.stored_weights import StoredWeights, validated_weights

OTHER = f"name another one in {KEY}"
REMEDY = f"copy it again, or {OTHER}"
DERIVED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
"""Name suffixes of masks and frequencies, which old files store although they follow from the config."""


class InitialWeights:
    """Weights that a run starts from, checked to fit its model. `read` takes names of the model's weights, which can
    differ from the stored names by a prefix."""

    def __init__(self, pretrained: Pretrained, model: LanguageModel):
        """Open the weights. Raises ModelError or CheckpointError, in one line that names the first weight that is missing,
        unexpected or of another shape."""
        self.pretrained = pretrained
        self.recorded: dict[str, Any] = {"path": pretrained.name, "step": pretrained.step}
        """Path and step of the weights, for the run's record; `verify` adds their digest."""
        self._written: dict[str, Digest] | None = None  # recorded by the writer; None if it was not llmtrain
        self._reader: StoredWeights | SafetensorsReader
        self._replicas = 1
        if pretrained.is_checkpoint:
            state = read_state(pretrained.folder)
            self._written, prefixes = state["files"], validated_weights(state)
            stored = FullTensorReader(pretrained.folder, REMEDY, OTHER)
            self._reader, self._replicas = StoredWeights(stored, prefixes), len(prefixes)
            self._files = sorted(self._written)
        else:
            self._reader = SafetensorsReader(pretrained.folder)
            self._written, self._files = _export_digests(pretrained.folder), self._reader.files
        self._names = _match(model, self._reader.shapes, pretrained.name)

    def read(self, name: str) -> torch.Tensor:
        """Return a full weight in fp32 on the CPU. Raises ModelError or CheckpointError if it is damaged, not finite, or stored
        twice with different values."""
        first, *copies = self._names[name]
        value = self._reader.read(first)
        for copy in copies:
            if not torch.equal(self._reader.read(copy), value):
                raise ModelError(
                    f"{KEY}: {self.pretrained.name}: {copy} differs from {first}, but config.json ties them; "
                    "set its tie_word_embeddings to false"
                )
        return value

    def verify(self, mesh: Mesh) -> None:
        """Check the files against their digests, compare nodes, and record the digest of the weights. A collective of all
        ranks, each of which reads its share of its node's files.

        Raises CheckpointError or ModelError, on every rank, if a file is not what was written, or if nodes have different
        files.
        """
        world, folder, host = mesh.world, self.pretrained.folder, socket.gethostname()
        share = self._files[world.local_rank :: world.local_size]

        def read() -> dict[str, Digest]:
            try:
                found = digests(folder, share)
            except OSError as error:
                raise ModelError(f"{KEY}: {folder} on {host} can't be read ({one_line(error)}); {REMEDY}") from None
            for name in share:
                if self._written is not None and tuple(self._written.get(name, ())) != found[name]:
                    raise CheckpointError(
                        f"{KEY}: {folder} on {host} is damaged: {name} is not what was written; {REMEDY}"
                    )
            return found

        mine = raise_on_all(mesh, read)
        my_node = world.rank - world.local_rank, host
        of_nodes: dict[tuple[int, str], dict[str, Digest]] = {}
        for node, part in mesh.all_ranks.all_gather_object((my_node, mine), "comparing the weights to start from"):
            of_nodes.setdefault(node, {}).update(part)
        (_, first_host), first = next(iter(of_nodes.items()))
        for (rank, other_host), files in of_nodes.items():
            if changed := [name for name in self._files if files.get(name) != first.get(name)]:
                raise ModelError(
                    f"{KEY}: {self.pretrained.name}: rank {rank} on {other_host} has a different {changed[0]} than rank 0 on "
                    f"{first_host}; copy the folder from one host to all"
                )
        text = json.dumps([(name, first[name]) for name in self._files])
        self.recorded["digest"] = hashlib.sha256(text.encode()).hexdigest()

    def describe(self) -> str:
        """Return the console's line about the weights."""
        what = f"{len(self._names)} tensors"
        if self._replicas > 1:
            what += f", the mean of {self._replicas} replicas"
        return f"weights: from {self.pretrained.name} ({what})"


def _export_digests(folder: Path) -> dict[str, Digest] | None:
    """Return the digests in the manifest of an export, or None for a folder that `export` has not written. Raises
    ModelError if the manifest is damaged."""
    try:
        files = json.loads((folder / EXPORT_MANIFEST).read_text(encoding="utf-8"))["files"]
        listed = {str(name): (int(size), str(digest)) for name, (size, digest) in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{KEY}: {folder / EXPORT_MANIFEST} is damaged; export the model again") from None
    if strange := next((name for name in listed if not is_bare_file_name(name)), None):
        raise ModelError(f"{KEY}: {folder / EXPORT_MANIFEST} names {strange!r}, which is not a file in its folder")
    return listed


def _match(model: LanguageModel, stored: dict[str, torch.Size], name: str) -> dict[str, list[str]]:
    """Return each weight's stored names, by the model's name for it. A tied embedding may have two stored names. Raises
    ModelError if weights are missing, unexpected or of another shape."""
    prefix = f"{model.causal_lm.base_model_prefix}."
    found: dict[int, list[str]] = {}
    for full, parameter in model.causal_lm.named_parameters(remove_duplicate=False):
        names = dict.fromkeys((full, full.removeprefix(prefix)))  # files of a model without its head have no prefix
        found.setdefault(id(parameter), []).extend(one for one in names if one in stored)
    expected = dict(model.causal_lm.named_parameters())
    missing = [full for full, parameter in expected.items() if not found[id(parameter)]]
    if missing:
        raise ModelError(f"{KEY}: {name} lacks {_first_of(missing)} of the recipe's model; give complete weights")
    known = {one for names in found.values() for one in names}
    if strange := [one for one in stored if one not in known and not one.endswith(DERIVED)]:
        raise ModelError(
            f"{KEY}: {name} has {_first_of(strange)}, which the recipe's model lacks; give weights of this model"
        )
    for parameter in expected.values():
        for one in found[id(parameter)]:
            if stored[one] != parameter.shape:
                raise ModelError(
                    f"{KEY}: {name} has {one} of shape {list(stored[one])}, but the recipe's model has "
                    f"{list(parameter.shape)}; change model.config, or leave it out to take the architecture of the weights"
                )
    return {full: found[id(parameter)] for full, parameter in expected.items()}


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


def check_initial_weights(
    recipe: Recipe, prepared: TokenDataset | None = None, download: bool = False
) -> InitialWeights | None:
    """Return the weights that the recipe's run would start from, after checking their headers; None if there is nothing
    to check.

    There is nothing to check if the run starts from random weights or continues from its own checkpoint, or if the
    weights are only on the hub and `download` is false. Raises UserError if the weights do not fit the recipe's model
    or tokenizer.
    """
    name, directory = recipe.model.from_weights, RunDirectory(recipe)
    if name is None or checkpoint_folders(directory.checkpoints):
        return None
    try:
        pretrained = find_pretrained(name, download)
        return None if pretrained is None else _open(recipe, pretrained, prepared)
    except UserError:
        if has_mirrored_checkpoint(recipe):
            return None
        raise


def open_initial_weights(recipe: Recipe, mesh: Mesh, prepared: TokenDataset) -> InitialWeights | None:
    """Return the weights that the run starts from, verified and if necessary downloaded; None for random weights. A
    collective of all ranks.

    Raises UserError, on every rank, if they do not exist, are damaged, differ between nodes, or do not fit.
    """
    name = recipe.model.from_weights
    if name is None:
        return None
    # Rank 0 chooses the checkpoint, because the run that writes checkpoints may still be training and add others.
    chosen = mesh.broadcast_from_main(lambda: find_pretrained(name, download=True))

    def find() -> InitialWeights:
        # Files from the hub may be in another folder on another node.
        here = chosen if local_path(name) is not None else find_pretrained(name, download=True)
        return _open(recipe, here, prepared)

    weights = raise_on_all(mesh, find)
    weights.verify(mesh)
    return weights


def _open(recipe: Recipe, pretrained: Pretrained, prepared: TokenDataset | None) -> InitialWeights:
    tokenizer = existing_tokenizer(recipe.data) if prepared is None else prepared.load_tokenizer()
    size = trained_size(recipe.data.tokenizer) if tokenizer is None else vocab_size(tokenizer)
    theirs, their_size = _tokenizer_of(pretrained), size
    if theirs is not None:
        their_size = vocab_size(theirs)
        if tokenizer is not None:
            check_same_tokenizer(pretrained, theirs, tokenizer, recipe.data.tokenizer)
    there = pretrained_config(pretrained, their_size)
    here = model_config(recipe.model, size or getattr(there, "vocab_size", None))
    check_architecture(recipe.model, here, there, pretrained)
    return InitialWeights(pretrained, build(here, recipe.parallel.loss_chunk))


def _tokenizer_of(pretrained: Pretrained) -> PreTrainedTokenizerBase | None:
    if pretrained.tokenizer is None:
        return None
    return read_tokenizer(
        pretrained.tokenizer,
        lambda why: ModelError(f"{KEY}: the tokenizer in {pretrained.tokenizer} can't be read ({why}); copy it again"),
        trust_remote_code=False,
    )


def check_same_tokenizer(
    pretrained: Pretrained, theirs: PreTrainedTokenizerBase, mine: PreTrainedTokenizerBase, name: str
) -> None:
    """Raise ModelError if a token of `theirs`, the weights' tokenizer, has another id in `mine`, the recipe's tokenizer `name`.
    `mine` may have additional tokens."""
    ids = mine.get_vocab()
    for token, number in sorted(theirs.get_vocab().items(), key=lambda item: item[1]):
        if ids.get(token) != number:
            raise ModelError(
                f"{KEY}: {pretrained.name} was trained with a different tokenizer than data.tokenizer={name}: its token {number}, "
                f"{token!r}, {f'is {ids[token]}' if token in ids else 'does not exist'} there; give "
                f"data.tokenizer={pretrained.tokenizer}"
            )
