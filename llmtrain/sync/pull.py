"""PALSGD's pseudo-synchronisation (arXiv 2504.18454): a step that pulls towards the anchor and computes no gradient."""

from __future__ import annotations

import random

from llmtrain.config import PullSection
from llmtrain.seeding import derive_seed
from llmtrain.sync.anchors import flatten
from llmtrain.sync.synchroniser import Synchroniser


class Pull:
    """Draws belong to a replica and a step: independent between replicas, equal on the ranks of one."""

    def __init__(self, section: PullSection, synchroniser: Synchroniser, seed: int):
        self.section, self.synchroniser, self.seed = section, synchroniser, seed

    def is_drawn(self, step: int) -> bool:
        """Whether this replica pulls in local step `step`; true with probability p."""
        name = derive_seed(self.seed, "pull", self.synchroniser.replica.rank, step)
        return random.Random(name).random() < self.section.probability

    def gradient_lr(self, lr: float) -> float:
        """lr / (1 - p): what a step that is not drawn trains with, so that the expected movement is lr's."""
        return lr / (1 - self.section.probability)

    def apply(self, lr: float) -> None:
        """theta <- theta - (lr eta / p)(theta - anchor), on every tensor."""
        kappa = lr * self.section.strength / self.section.probability
        if kappa == 0:
            return
        blocks, anchors = self.synchroniser.engine.blocks, self.synchroniser.anchors
        for index in anchors.visit(self.synchroniser.blocks):
            self.synchroniser.install(index, flatten(blocks[index]).lerp_(anchors.load_anchor(index), kappa))
