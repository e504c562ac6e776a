"""Full weights of a checkpoint, read one tensor at a time by a process that need not be a rank. Exports read them, and
runs that start from another run's weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from llmtrain.errors import CheckpointError
from llmtrain.model import PREFIX
from llmtrain.train.checkpoint import ANCHOR, CheckpointReader

PART = 1 << 22
"""Number of elements that are added per operation. It limits memory, because torch makes an fp64 copy of what it adds."""


class FullTensorReader(CheckpointReader):
    """Reader of a checkpoint's full tensors by name, for a process that is not a rank."""

    def __init__(self, path: Path, remedy: str, other: str):
        """Open a checkpoint. `remedy` and `other` end error messages: advice for a damaged checkpoint, and how to choose
        another one. Raises CheckpointError if the metadata is damaged."""
        self.remedy, self.other = remedy, other
        super().__init__(path)
        metadata = self._reader.read_metadata()
        self._entries = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self, prefix: str) -> dict[str, torch.Size]:
        """Return the shapes of the tensors whose names begin with `prefix`, keyed by the rest of the name."""
        return {
            name.removeprefix(prefix): entry.size for name, entry in self._entries.items() if name.startswith(prefix)
        }

    def read_full_tensor(self, name: str) -> torch.Tensor:
        """Return one full tensor on the CPU. Raises CheckpointError if it can't be read or has values that are not finite."""
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read({name: tensor})
        if not tensor.isfinite().all():
            raise CheckpointError(f"{self.path}: {name} holds a value that is not finite; {self.other}")
        return tensor


class StoredWeights:
    """Weights of a checkpoint by transformers' names, read one at a time in fp32. A weight is the mean of the tensors that are
    stored for it under each of `prefixes`, such as those of the replicas."""

    def __init__(self, stored: FullTensorReader, prefixes: Sequence[str]):
        self.stored, self.prefixes = stored, prefixes
        self.shapes = stored.shapes(f"{prefixes[0]}{PREFIX}")

    def read(self, name: str) -> torch.Tensor:
        """Return one full weight in fp32.

        The mean is summed in fp64 and rounded once, so that the mean of equal replicas is bit-identical to each of
        them.
        """
        first, *others = (f"{prefix}{PREFIX}{name}" for prefix in self.prefixes)
        if not others:
            return self.stored.read_full_tensor(first).float()
        total = self.stored.read_full_tensor(first).double()
        for other in others:
            parts = self.stored.read_full_tensor(other).view(-1).split(PART)
            for sum_of_part, part in zip(total.view(-1).split(PART), parts, strict=True):
                sum_of_part += part
        return total.div_(1 + len(others)).float()


def validates_anchor(state: dict[str, Any]) -> bool:
    """Return whether a run validates its anchor and not the replicas' mean, given the state.json of a checkpoint."""
    return state.get("validated") == ANCHOR


def validated_weights(state: dict[str, Any]) -> list[str]:
    """Return the prefixes for `StoredWeights` of the weights that the run has validated, given the checkpoint's
    state.json: those of all replicas, whose mean it validates, or that of the anchor."""
    return ["anchor."] if validates_anchor(state) else weights_of_replicas(range(state["mesh"][0]))


def weights_of_replicas(replicas: Sequence[int]) -> list[str]:
    """Return the prefixes under which a checkpoint stores these replicas' weights."""
    return [f"replica{replica}.weights." for replica in replicas]
