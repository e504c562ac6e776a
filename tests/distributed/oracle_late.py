"""The oracle for schedules that use a mean some time after it was sent: CO2 and Streaming DiLoCo."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tests.distributed.oracle import Oracle


class DelayedOracle(Oracle):
    """CO2: at a round's end the mean sent one round earlier is used."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[list[np.ndarray]] = []  # the mean pseudo-gradients of every round so far, by block
        self.sent_lrs: list[list[float]] = []  # and its learning rates

    def synchronize(self) -> None:
        """A round's end."""
        self.sent.append([self.mean_of(block) for block in self.blocks])
        self.sent_lrs.append(self.lrs[0])
        if len(self.sent) > 1:
            then, now = sum(self.sent_lrs[-2]), sum(self.sent_lrs[-1])
            has_gap = self.sync.schedule.gap_penalty and now > 0  # there is none to a round without a learning rate
            self.use(-2, max(1.0, then / now) if has_gap else 1.0)
        for block in self.blocks:
            self.restart(block)
        self.lrs = [[] for _ in self.replicas]

    def use(self, which: int, gap: float) -> None:
        for block in self.blocks:
            self.outer_step(block, self.sent[which][block] / gap, self.unit([self.sent_lrs[which]]))
        self.count += 1

    def finish(self) -> None:
        super().finish()
        if self.sent:
            self.use(-1, 1.0)
            for block in self.blocks:
                self.restart(block)


class OverlappedOracle(Oracle):
    """Streaming DiLoCo. Every turn of a run is known beforehand, and so is the step after which its mean is used."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        section, blocks = self.sync.schedule, len(self.blocks)
        parts = section.fragments
        if section.fragment_layout == "strided":
            self.fragment_of = [block % parts for block in self.blocks]
        else:
            bounds = [blocks * (part + 1) // parts for part in range(parts)]
            self.fragment_of = [sum(block >= bound for bound in bounds) for block in self.blocks]
        rounds = list(pairwise([self.warmup, *self.ends]))
        turns = [[self._turn(start, end, part) for start, end in rounds] for part in range(parts)]
        self.turns = [[turn for turn in of_part if turn <= self.last] for of_part in turns]
        self.means: dict[int, np.ndarray] = {}  # by block, of the newest turn

    @property
    def last(self) -> int:
        return self.rates.total_steps

    def _turn(self, start: int, end: int, part: int) -> int:
        """ceil((p + 1) H / P) steps into the round, in whole numbers."""
        parts = self.sync.schedule.fragments
        return start + ((part + 1) * (end - start) + parts - 1) // parts

    def after_step(self, step: int) -> None:
        for part, turns in enumerate(self.turns):
            for number, turn in enumerate(turns):
                next_turn = turns[number + 1] if number + 1 < len(turns) else self.last + 1
                due = min(turn + self.sync.schedule.steps, next_turn)
                if step == due > turn:
                    self.use(part, number)
                if step == turn:
                    self.send(part)
                    if due == turn:
                        self.use(part, number)

    def of(self, part: int) -> list[int]:
        return [block for block in self.blocks if self.fragment_of[block] == part]

    def send(self, part: int) -> None:
        for block in self.of(part):
            self.means[block] = self.mean_of(block)

    def use(self, part: int, number: int) -> None:
        """The mean of fragment `part`'s turn `number`, and the learning rates of the steps that led to it."""
        mix, turns = self.sync.schedule.alpha, self.turns[part]
        since = turns[number - 1] if number else self.warmup
        lrs = [self.rates.at(step) for step in range(since + 1, turns[number] + 1)]
        for block in self.of(part):
            self.outer_step(block, self.means[block], self.unit([lrs]))
            self.theta[block] = mix * self.theta[block] + (1 - mix) * self.anchor[block]
        self.count += part == len(self.turns) - 1

    def finish(self) -> None:
        for part, turns in enumerate(self.turns):
            if turns and turns[-1] + self.sync.schedule.steps > self.last:
                self.use(part, len(turns) - 1)
        newest = [turns[-1] if turns else min(self.warmup, self.last) for turns in self.turns]
        has_turned = any(self.turns)
        if min(newest) == self.last and not (has_turned and self.sync.schedule.alpha > 0):
            return
        lrs = [self.rates.at(step) for step in range(min(newest) + 1, self.last + 1)]
        for block in self.blocks:
            self.outer_step(block, self.mean_of(block), self.unit([lrs]))
            self.restart(block)
        self.count += 1
