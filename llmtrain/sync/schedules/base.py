"""What a method knows of a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from llmtrain.sync.block_sync import BlockSync
from llmtrain.sync.require_equal import require_equal

BlockTensors = list[torch.Tensor | None]
"""A flat tensor for each block that has one."""


class Schedule(ABC):
    """Carries out synchronizations. Called in local steps only; `period` decisions are handed in."""

    staleness = 0
    """Steps between sending a message and using what came of it."""

    def __init__(self, block_sync: BlockSync):
        self.block_sync = block_sync

    def begin_step(self) -> None:
        """Before a local step."""

    def before_block(self, index: int) -> None:
        """In a training forward, before block `index` is gathered."""

    @abstractmethod
    def end_step(self, step: int, lr: float, ends_round: bool) -> None:
        """After local step `step`, whose learning rate was `lr`."""

    def flush(self) -> None:
        """Carry out what is waiting for the next forward, because parameters are about to be changed without one."""

    @abstractmethod
    def finish(self) -> None:
        """Take in what is under way and synchronize what is not: after it all replicas are equal."""

    def close(self) -> None:
        """Free what training needed beside memory; also after a failure."""

    @property
    @abstractmethod
    def is_synchronized(self) -> bool:
        """All replicas hold the same parameters, and nothing is under way."""

    def shared_state(self) -> dict[str, BlockTensors]:
        """State that all replicas have alike, beside anchor and momentum."""
        return {}

    def per_replica_state(self) -> dict[str, BlockTensors]:
        """State that each replica has for itself."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The rest, as plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], tensors: dict[str, BlockTensors]) -> None:
        """The inverse of `state_dict`; `tensors` are the shared and own ones by name."""

    def resharded(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The plain values of each replica of this run, which others with these `states` began."""
        return require_equal(states)
