"""N replicas in one process, in NumPy float64: the methods' equations written a second time, as plainly as possible.

Nothing here is taken from `llmtrain.sync` but the recipe's numbers: a block is one matrix [replicas, elements], there
are no shards, no messages and no order of work, and the statistics are computed anew from every norm ever recorded.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from llmtrain.config import NesterovOuter, SgdOuter, SyncSection


class Oracle:
    """Replicas that start equal. Per step: `forward`, then `end_step` with every replica's update; `finish` at the end.

    `theta[l]` is block l as [replicas, elements]; `start[l]` its initial value, [elements].
    """

    def __init__(self, sync: SyncSection, start: list[np.ndarray], replicas: int) -> None:
        self.sync = sync
        self.theta = [np.repeat(block[None], replicas, axis=0) for block in start]
        self.anchor = [block.copy() for block in start]
        self.momentum = [np.zeros_like(block) for block in start]
        self.ordinary_norms: dict[tuple[int, int], list[float]] = defaultdict(list)  # of (replica, block), oldest first
        self.count = self.anomalies = self.rollbacks = 0
        self.armed = False
        self.local_steps = 0

    def is_synchronous(self, step: int) -> bool:
        return self.sync.period.kind == "every_step" or step <= self.sync.warmup_steps

    def forward(self) -> None:
        """A layer-wise synchronisation is carried out here."""
        if self.armed:
            self.synchronise()

    def end_step(self, step: int, updates: list[np.ndarray]) -> None:
        """Add each replica's update, or the replicas' mean of it while steps are synchronous; synchronise when due."""
        if self.is_synchronous(step):
            self.theta = [theta + update.mean(0) for theta, update in zip(self.theta, updates, strict=True)]
            self.anchor = [theta[0].copy() for theta in self.theta]
            return
        self.theta = [theta + update for theta, update in zip(self.theta, updates, strict=True)]
        self.local_steps += 1
        if (step - self.sync.warmup_steps) % self.sync.period.every == 0:
            self.armed = True
            if self.sync.schedule.kind == "blocking":
                self.synchronise()

    def finish(self) -> None:
        if self.local_steps:
            self.synchronise()

    def synchronise(self) -> None:
        for block in range(len(self.theta)):
            self._synchronise_block(block)
        self.count += 1
        self.armed, self.local_steps = False, 0

    def _synchronise_block(self, block: int) -> None:
        moved = self.anchor[block] - self.theta[block]  # D_n: [replicas, elements]
        weights = self._weights(block, np.linalg.norm(moved, axis=1))
        if weights is None:
            self.rollbacks += 1
        else:
            counted = weights > 0  # a replica left out may hold NaN, and 0 x NaN is NaN
            self._outer_step(block, self._clipped(weights[counted] @ moved[counted]))
        self.theta[block] = np.repeat(self.anchor[block][None], len(moved), axis=0)

    def _weights(self, block: int, norms: np.ndarray) -> np.ndarray | None:
        """[replicas]; None if all replicas are anomalous."""
        penalty = self.sync.penalty
        if penalty is None:
            return np.full(len(norms), 1 / len(norms))
        weights = np.zeros(len(norms))
        for replica, norm in enumerate(norms):
            if self._is_anomalous(self.ordinary_norms[replica, block], norm):
                self.anomalies += 1
            else:
                weights[replica] = 1.0 if penalty.temperature is None else np.exp(-norm / penalty.temperature)
                self.ordinary_norms[replica, block].append(norm)
        return weights / weights.sum() if weights.any() else None

    def _is_anomalous(self, past: list[float], norm: float) -> bool:
        penalty = self.sync.penalty
        if not np.isfinite(norm):
            return True
        if penalty.z is None or len(past) < penalty.min_rounds:
            return False
        age = np.arange(len(past))[::-1]
        weights = penalty.ema * (1 - penalty.ema) ** age
        weights /= weights.sum()
        mean = weights @ np.array(past)
        deviation = np.sqrt(weights @ (np.array(past) - mean) ** 2)
        return norm > mean and norm - mean > penalty.z * deviation

    def _clipped(self, mean: np.ndarray) -> np.ndarray:
        penalty = self.sync.penalty
        if penalty is None or penalty.clip is None:
            return mean
        return mean * min(penalty.clip / (np.linalg.norm(mean) + 1e-6), 1.0)

    def _outer_step(self, block: int, mean: np.ndarray) -> None:
        outer = self.sync.outer
        if isinstance(outer, NesterovOuter):
            self.momentum[block] = outer.momentum * self.momentum[block] + mean
            mean = mean + outer.momentum * self.momentum[block]
        lr = outer.lr if isinstance(outer, NesterovOuter | SgdOuter) else 1.0
        self.anchor[block] = self.anchor[block] - lr * mean
