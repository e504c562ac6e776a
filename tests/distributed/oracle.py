"""Oracle of N replicas in one process, in NumPy float64: the methods' equations written a second time, as plainly as possible.

The oracle takes the recipe's values and nothing of `llmtrain.sync`. A block is one matrix [replicas, elements]. There are no
messages, no order of work, and no shards except where messages are rounded. The statistics are computed anew from every norm ever
recorded. A layer-wise synchronization is a blocking one here: it is due at the same moment and sees the same parameters.

`Oracle` has what all methods share, and the blocking schedule. oracle_late.py has the schedules that use a mean later, and
oracle_timed.py the timed rounds.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmtrain.config import AverageSection, EditPenaltySection, SyncSection
from llmtrain.lr import LRSchedule
from llmtrain.seeding import derive_seed
from tests.distributed.oracle_outer import displacement_of, in_round, unit_of
from tests.distributed.oracle_wire import summed

FIRST_DECAY, SECOND_DECAY = 0.6, 0.7
"""Decay rates of the moments of an inner optimizer that has moments."""
Direction = Callable[[int, int, int, np.ndarray], np.ndarray]
"""Function from (step, replica, block, parameters of the block) to what an inner step at learning rate 1 adds to them."""


@dataclass
class Sent:
    """Result of what the replicas have sent of a block."""

    mean: np.ndarray | None
    """Mean as it arrives, after clipping; None if all replicas are anomalous."""
    weights: np.ndarray
    """Weight of each replica; 0 if it is anomalous."""
    lrs: list[list[float]]
    """Learning rates of the local steps that led to the message, by replica."""


class Oracle:
    """Replicas that start equal, from one vector per block, `start`. `theta[l]` is block l as [replicas, elements]."""

    def __init__(
        self,
        sync: SyncSection,
        rates: LRSchedule,
        start: list[np.ndarray],
        replicas: int,
        direction: Direction,
        seed: int = 0,
        cuts: Sequence[Sequence[np.ndarray]] | None = None,
        tokens: Callable[[int, int], int] = lambda replica, step: 1,
        adapts: bool = False,
    ) -> None:
        """Create the replicas. `cuts` has, for each block, the indices of each shard's elements, because the messages of shards are
        rounded separately. `tokens` returns the tokens of a replica's step."""
        self.tokens = tokens
        self.sync, self.rates, self.direction, self.seed = sync, rates, direction, seed
        self.replicas = range(replicas)
        self.blocks = range(len(start))
        self.theta = [np.repeat(block[None], replicas, axis=0) for block in start]
        self.moments = [(np.zeros_like(theta), np.zeros_like(theta)) for theta in self.theta] if adapts else []
        """First and second moments of each replica's inner optimizer, by block; empty if it has none."""
        self.averaged = self.moments
        """Moments that `sync.moments` averages. They may also be those of an optimizer behind `direction`."""
        self.rounds_of_moments = 0
        self.anchor = [block.copy() for block in start]
        self.momentum = [np.zeros_like(block) for block in start]
        self.fast: dict[int, np.ndarray] = {}
        """z of primal averaging, by block; a missing z equals the anchor."""
        self.cuts = cuts or [[np.arange(len(block))] for block in start]
        self.errors = [np.zeros_like(theta) for theta in self.theta]
        """Rounding errors of each replica's messages so far, by block."""
        self.known_norms: dict[tuple[int, int], list[float]] = defaultdict(list)  # by (replica, block), oldest first
        self.known_steps: dict[tuple[int, int], list[int]] = defaultdict(list)  # of the same rounds
        self.left_out: dict[tuple[int, int], int] = defaultdict(int)  # consecutive rounds, by (replica, block)
        self.count = self.anomalies = self.rollbacks = 0
        self.squares = (0.0, 0.0)
        """Sums over all blocks in the last round: replicas x ||D||^2, if they have an anchor, and the sum of ||D_n - D||^2."""
        self.lrs: list[list[float]] = [[] for _ in self.replicas]  # of each replica's local steps since the last round
        self.trained: list[list[int]] = [[] for _ in self.replicas]  # tokens of each replica's local steps
        self.seen: list[list[list[np.ndarray]]] = [[] for _ in self.replicas]  # [replica][step][block]
        self.agreed: list[list[tuple[int, int]]] = [[] for _ in self.replicas]  # (replica's step, run's step)
        self.warmup = self._warmup()
        self.ends = self._ends()

    # --- the run

    def run(self) -> None:
        """Do the whole run, with its last, shorter round."""
        for step in range(1, self.rates.total_steps + 1):
            if step <= self.warmup:
                self.train_together(step)
            else:
                for replica in self.replicas:
                    self.train_alone(replica, step)
                self.after_step(step)
                if self.sync.moments is not None and step in self.ends:
                    self.average_moments()
            for replica in self.replicas:
                self.agreed[replica].append((step, step))
        self.finish()

    def after_step(self, step: int) -> None:
        if step in self.ends:
            self.synchronize()

    def average_moments(self) -> None:
        """Average the moments that are due at the end of a round."""
        self.rounds_of_moments += 1
        is_due = {
            order: every is not None and self.rounds_of_moments % every == 0
            for order, every in ((1, self.sync.moments.first), (2, self.sync.moments.second))
        }
        for first, second in self.averaged:
            if is_due[2]:
                second[:] = second.mean(0)
            if is_due[1]:
                first[:] = np.where(second > 0, first.mean(0), 0.0)

    def adapted(self, replica: int, block: int, direction: np.ndarray) -> np.ndarray:
        """Return the inner step in this direction."""
        if not self.moments:
            return direction
        first, second = self.moments[block]
        first[replica] = FIRST_DECAY * first[replica] + direction
        second[replica] = SECOND_DECAY * second[replica] + direction**2
        return first[replica] / (1 + np.sqrt(second[replica]))

    def finish(self) -> None:
        if any(self.lrs):
            self.synchronize()
        if self.sync.outer.kind == "gpa":
            self.fast = {}
            for block in self.blocks:
                self.restart(block)

    def train_together(self, step: int) -> None:
        """Let every replica step in the mean direction. All replicas stay equal, and the anchor equals them."""
        mean = [
            np.mean([self.direction(step, n, block, self.theta[block][n]) for n in self.replicas], axis=0)
            for block in self.blocks
        ]
        for replica in self.replicas:
            self.see(replica)
        for block in self.blocks:
            steps = [self.adapted(replica, block, mean[block]) for replica in self.replicas]
            self.theta[block] = self.theta[block] + self.rates.at(step) * np.stack(steps)
            self.anchor[block] = self.theta[block][0].copy()

    def train_alone(self, replica: int, step: int) -> None:
        """Do a local step of one replica: an inner step, or PALSGD's pull."""
        lr, pull = self.rates.at(min(step, self.rates.total_steps)), self.sync.pull
        if pull is not None and self.draws_pull(replica, step):
            for theta, anchor in zip(self.theta, self.anchor, strict=True):
                theta[replica] -= lr * pull.strength / pull.probability * (theta[replica] - anchor)
            self.see(replica)
        else:
            self.see(replica)
            inner_lr = lr if pull is None else lr / (1 - pull.probability)
            for block, theta in enumerate(self.theta):
                direction = self.direction(step, replica, block, theta[replica])
                theta[replica] += inner_lr * self.adapted(replica, block, direction)
        self.lrs[replica].append(lr)
        self.trained[replica].append(self.tokens(replica, step))

    def draws_pull(self, replica: int, step: int) -> bool:
        return random.Random(derive_seed(self.seed, "pull", replica, step)).random() < self.sync.pull.probability

    def see(self, replica: int) -> None:
        self.seen[replica].append([theta[replica].copy() for theta in self.theta])

    # --- when rounds end

    def _warmup(self) -> int:
        """Return the last synchronous step."""
        total, share = self.rates.total_steps, self.sync.warmup_until_lr
        if self.sync.period.kind == "every_step":
            return total
        last = 0
        if share is not None:
            last = self.rates.warmup_steps
            while last < total and self.rates.at(last + 1) > share * self.rates.peak:
                last += 1
        return max(self.sync.warmup_steps, last)

    def _ends(self) -> list[int]:
        """Return the last step of each round, if rounds are of steps. The run may end within the last round."""
        period, total, ends = self.sync.period, self.rates.total_steps, [self.warmup]
        while ends[-1] < total and period.kind in ("steps", "qsr"):
            if period.kind == "steps":
                ends.append(ends[-1] + period.every)
            else:
                lr = self.rates.at(max(ends[-1] + 1, self.rates.warmup_steps))
                steps = max(period.base, int((period.alpha / lr) ** period.power + 1e-9)) if lr else total
                ends.append(min(ends[-1] + steps, total))
        return ends[1:]

    # --- what is averaged

    def synchronize(self) -> None:
        """Synchronize all blocks at once. Afterwards, all replicas are equal."""
        unit = self.unit(self.lrs)
        of_mean = of_spread = 0.0
        for block in self.blocks:
            moved = self.anchor[block] - self.theta[block]  # D_n: [replicas, elements]
            weights = self._weights(block, np.linalg.norm(moved, axis=1), self.lrs)
            if weights is None:
                self.rollbacks += 1
            else:
                counted = weights > 0
                mean = self.sum_of(block, weights, moved)
                of_mean += len(self.replicas) * (mean @ mean)
                of_spread += ((moved[counted] - mean) ** 2).sum()
                self.outer_step(block, self._lengthened(mean, np.linalg.norm(moved, axis=1)), unit)
            self.restart(block)
        self.squares = (of_mean if self.has_anchor else 0.0, of_spread)
        self.count += 1
        self.lrs = [[] for _ in self.replicas]

    def sum_of(self, block: int, weights: np.ndarray, moved: np.ndarray) -> np.ndarray:
        """Return the weighted sum of the replicas' displacements, as it arrives: [elements]."""
        counted = weights > 0  # an excluded replica may hold NaN, and 0 x NaN is NaN
        wire = self.sync.wire
        if wire.kind == "fp32" or len(self.replicas) == 1:
            return weights[counted] @ moved[counted]
        messages = np.zeros_like(moved)
        messages[counted] = weights[counted, None] * moved[counted]
        if wire.error_feedback:
            messages[counted] += wire.feedback_decay * self.errors[block][counted]
            self.errors[block][counted] = 0.0
        result = np.empty_like(moved[0])
        for places in self.cuts[block]:
            if len(places):
                result[places], lost = summed(messages[:, places], wire)
                self.errors[block][:, places] += np.nan_to_num(lost, nan=0.0, posinf=0.0, neginf=0.0)
        return result

    def sent_from(self, block: int, lrs: list[list[float]]) -> Sent:
        """Return the result of what replicas send of a block now, after local steps with these learning rates."""
        moved = self.anchor[block] - self.theta[block]
        norms = np.linalg.norm(moved, axis=1)
        weights = self._weights(block, norms, lrs)
        if weights is None:
            self.rollbacks += 1
            return Sent(None, weights=np.zeros(len(moved)), lrs=lrs)
        return Sent(self._lengthened(self.sum_of(block, weights, moved), norms), weights, lrs)

    def restart(self, block: int) -> None:
        """Let all replicas continue from the anchor, or from y with primal averaging."""
        self.theta[block] = np.repeat(self._y(block)[None], len(self.replicas), axis=0)

    def _y(self, block: int) -> np.ndarray:
        outer, x = self.sync.outer, self.anchor[block]
        return outer.share * x + (1 - outer.share) * self.fast.get(block, x) if outer.kind == "gpa" else x

    @property
    def penalty(self) -> EditPenaltySection | None:
        """Section of EDiT's penalty; None if the reduction has none."""
        return self.sync.reduction if self.sync.reduction.kind == "edit_penalty" else None

    @property
    def has_anchor(self) -> bool:
        """True if displacements from an anchor are sent instead of the parameters themselves."""
        is_mean = self.sync.reduction.kind == "mean"
        is_plain = isinstance(self.sync.outer, AverageSection) and is_mean and self.sync.pull is None
        return not is_plain or self.sync.wire.kind != "fp32"

    def _weights(self, block: int, norms: np.ndarray, lrs: list[list[float]]) -> np.ndarray | None:
        """Return the replicas' weights, given the learning rates of their local steps; None if all replicas are anomalous."""
        penalty = self.penalty
        if penalty is None:
            weights = self._weights_without_penalty(norms, [len(one) for one in lrs])
            self.anomalies += sum(weight is None for weight in weights)
            return (
                None if all(weight is None for weight in weights) else np.array([weight or 0.0 for weight in weights])
            )
        weights, steps, counted = np.zeros(len(norms)), np.zeros(len(norms)), 0
        for replica, norm in enumerate(norms):
            if self._is_left_out(replica, block, norm, lrs[replica]):
                self.anomalies += 1
            else:
                counted += 1
                weights[replica] = 1.0 if penalty.temperature is None else np.exp(-norm / penalty.temperature)
                steps[replica] = len(lrs[replica])
        if not counted:
            return None
        r = penalty.step_weight if steps.any() else 0.0
        return (1 - r) * weights / weights.sum() + r * steps / max(1, steps.sum())

    def _weights_without_penalty(self, norms: np.ndarray, steps: list[int]) -> list[float | None]:
        """Return the weight of each replica in a block. A replica that does not count has None."""
        kind, count = self.sync.reduction.kind, len(norms)
        if kind == "mean":
            return [1 / count] * count
        if kind == "token_weighted":
            tokens = [sum(past[len(past) - done :]) for past, done in zip(self.trained, steps, strict=True)]
            work = [sum_of_them**2 / done if done else 0.0 for sum_of_them, done in zip(tokens, steps, strict=True)]
            return [one / sum(work) for one in work] if any(work) else [1 / count] * count
        finite = [norm for norm in norms if np.isfinite(norm)]
        moved = [norm for norm in finite if norm > 0]
        if kind == "radial":
            common, among = float(np.mean(finite)) if finite else 0.0, len(moved)
        else:
            common, among = float(np.median(finite)) if finite else 0.0, len(finite)
        return [None if not np.isfinite(norm) else common / (among * norm) if norm else 0.0 for norm in norms]

    def _is_left_out(self, replica: int, block: int, norm: float, lrs: list[float]) -> bool:
        """Return whether the norm is anomalous, and record it by the rule of the penalty's statistics."""
        penalty, past = self.penalty, self.known_norms[replica, block]
        counts = self.known_steps[replica, block]
        if penalty.statistics == "adaptive":
            usual = self._of_past(counts)[0] if counts else 0.0
            is_mixed = getattr(self.sync.schedule, "alpha", 0.0) > 0  # then replicas do not start at the anchor
            power = 1.0 if is_mixed else 0.5
            norm = norm / (sum(lrs) or 1.0) * (min(1.0, len(lrs) / usual) ** power if usual else 1.0)
        if not np.isfinite(norm):
            self.left_out[replica, block] += 1
            return True
        mean, deviation = (
            self._of_past(past) if penalty.z is not None and len(past) >= penalty.min_rounds else (norm, 0.0)
        )
        if (
            norm > mean
            and norm - mean > (penalty.z or 0) * deviation
            and (deviation > 1e-6 * mean or penalty.statistics == "paper")
        ):
            self.left_out[replica, block] += 1
            if penalty.statistics == "adaptive":
                farthest = penalty.z * deviation * 2 ** (self.left_out[replica, block] - 1)
                past.append(min(norm, mean + farthest))
                counts.append(len(lrs))
            return True
        self.left_out[replica, block] = 0
        if norm > 0 or penalty.statistics == "paper" or penalty.z is None:
            past.append(norm)
            counts.append(len(lrs))
        return False

    def _of_past(self, past: list[float]) -> tuple[float, float]:
        """Return the mean and standard deviation, with weights that decay with age."""
        age = np.arange(len(past))[::-1]
        weights = self.penalty.ema * (1 - self.penalty.ema) ** age
        weights /= weights.sum()
        mean = weights @ np.array(past)
        return mean, np.sqrt(weights @ (np.array(past) - mean) ** 2)

    def _lengthened(self, mean: np.ndarray, norms: np.ndarray) -> np.ndarray:
        """Return the mean of a block as it is used: clipped, or scaled to the replicas' mean norm."""
        penalty = self.penalty
        if self.sync.reduction.kind == "radial" and mean.any():
            factor = np.mean(norms[np.isfinite(norms)]) / np.linalg.norm(mean)
            return mean * min(factor, len(norms))
        if penalty is None or penalty.clip is None:
            return mean
        return mean * min(penalty.clip / (np.linalg.norm(mean) + 1e-6), 1.0)

    # --- how the mean is applied

    def unit(self, lrs: list[list[float]]) -> float:
        return unit_of(self.sync.outer, lrs)

    def outer_step(self, block: int, mean: np.ndarray, g: float) -> None:
        """Take the outer step of a block, given D = `mean` of a round whose unit is `g`."""
        if (section := self.sync.outer).kind == "gpa":
            x, y = self.anchor[block], self._y(block)
            self.fast[block] = z = self.fast.get(block, x) + (x - mean) - y
            self.anchor[block] = section.decay * x + (1 - section.decay) * z
            return
        outer = in_round(self.sync.outer, self.count)
        self.momentum[block], displacement = displacement_of(outer, self.momentum[block], mean, g)
        self.anchor[block] = self.anchor[block] - displacement
