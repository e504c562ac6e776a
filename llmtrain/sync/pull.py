"""PALSGD's pseudo-synchronization (arXiv 2504.18454): a step that pulls toward the anchor and computes no gradient."""

from __future__ import annotations

import random

from llmtrain.config import PullSection
from llmtrain.seeding import derive_seed
from llmtrain.sync.anchors import flatten
from llmtrain.sync.block_sync import BlockSync


class Pull:
    """Random pulls toward the anchor. Whether a replica pulls is drawn from the seed, the replica's number and the step. Draws are
    therefore independent between replicas, equal on the ranks of a replica, and the same after a restart."""

    def __init__(self, section: PullSection, block_sync: BlockSync, seed: int):
        self.section, self.block_sync, self.seed = section, block_sync, seed

    def should_pull(self, step: int) -> bool:
        """Return whether this replica pulls in local step `step`; true with probability p."""
        name = derive_seed(self.seed, "pull", self.block_sync.replica_comms.rank, step)
        return random.Random(name).random() < self.section.probability

    def gradient_lr(self, lr: float) -> float:
        """Return lr / (1 - p), the learning rate of a step that computes a gradient. A fraction 1 - p of the steps compute one, so
        the expected movement per step is that of steps at lr."""
        return lr / (1 - self.section.probability)

    def pull_to_anchor(self, lr: float) -> None:
        """Pull every parameter: theta <- theta - (lr eta / p)(theta - anchor), with eta = `strength` and p = `probability`."""
        kappa = lr * self.section.strength / self.section.probability
        if kappa == 0:
            return
        blocks, anchors = self.block_sync.replica.blocks, self.block_sync.anchors
        for index in anchors.iter_prefetched(self.block_sync.blocks):
            self.block_sync.write_parameters(index, flatten(blocks[index]).lerp_(anchors.load_anchor(index), kappa))
