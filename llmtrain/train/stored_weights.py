"""Full weights of a checkpoint, read one tensor at a time by a process that need not be a rank. Used by exports, and by
runs that start from another run's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.model import PREFIX
from llmtrain.train.checkpoint_files import VALIDATED_ANCHOR
from llmtrain.train.checkpoint_reader import FullTensorReader, mean_of


class StoredWeights:
    """Weights of a checkpoint by transformers' names, read one at a time in fp32. A weight is the mean of the tensors that are
    stored for it under each of `prefixes`, such as one prefix per replica."""

    def __init__(self, stored: FullTensorReader, prefixes: Sequence[str]):
        self.stored, self.prefixes = stored, prefixes
        self.shapes = stored.shapes(f"{prefixes[0]}{PREFIX}")

    def read(self, name: str) -> torch.Tensor:
        """Return one full weight in fp32."""
        tensors = (self.stored.read_full_tensor(f"{prefix}{PREFIX}{name}") for prefix in self.prefixes)
        return (mean_of(tensors) if len(self.prefixes) > 1 else next(tensors)).float()


def validates_anchor(state: dict[str, Any]) -> bool:
    """Return whether a run validates its anchor and not the replicas' mean, given the state.json of a checkpoint."""
    return state.get("validated") == VALIDATED_ANCHOR


def validated_weights(state: dict[str, Any]) -> list[str]:
    """Return `StoredWeights` prefixes of the weights that the run validates, given a checkpoint's state.json: the
    prefixes of all replicas if it validates their mean, or else the anchor's."""
    return ["anchor."] if validates_anchor(state) else weights_of_replicas(range(state["mesh"][0]))


def weights_of_replicas(replicas: Sequence[int]) -> list[str]:
    """Return the prefixes under which a checkpoint stores these replicas' weights."""
    return [f"replica{replica}.weights." for replica in replicas]
