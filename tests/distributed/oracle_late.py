"""The oracle for schedules that use a mean some time after it was sent: CO2 and Streaming DiLoCo."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from tests.distributed.oracle import Oracle, Sent


class DelayedOracle(Oracle):
    """CO2: at a round's end what was sent one round earlier is used."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[list[Sent]] = []  # in every round so far, by block

    def synchronize(self) -> None:
        """A round's end."""
        self.sent.append([self.sent_from(block, self.lrs) for block in self.blocks])
        if len(self.sent) > 1:
            then, now = (np.mean([sum(lrs) for lrs in sent[0].lrs]) for sent in self.sent[-2:])
            has_gap = self.sync.schedule.gap_penalty and now > 0  # there is none to a round without a learning rate
            self.use(-2, max(1.0, then / now) if has_gap else 1.0)
        for block in self.blocks:
            self.restart(block)
        self.lrs = [[] for _ in self.replicas]

    def use(self, which: int, gap: float) -> None:
        for block, sent in zip(self.blocks, self.sent[which], strict=True):
            if sent.mean is not None:
                self.outer_step(block, sent.mean / gap, self.unit(sent.lrs))
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
        self.sent: dict[int, Sent] = {}  # by block, of the newest turn

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
                    self.use(part, self.sync.schedule.alpha)
                if step == turn:
                    self.send(part, number)
                    if due == turn:
                        self.use(part, self.sync.schedule.alpha)

    def of(self, part: int) -> list[int]:
        return [block for block in self.blocks if self.fragment_of[block] == part]

    def send(self, part: int, number: int) -> None:
        """Fragment `part`'s turn `number`."""
        turns = self.turns[part]
        since = turns[number - 1] if number else self.warmup
        lrs = [self.rates.at(step) for step in range(since + 1, turns[number] + 1)]
        for block in self.of(part):
            self.sent[block] = self.sent_from(block, [lrs for _ in self.replicas])

    def use(self, part: int, mix: float) -> None:
        for block in self.of(part):
            sent, theta = self.sent[block], self.theta[block]
            if sent.mean is not None:
                self.outer_step(block, sent.mean, self.unit(sent.lrs))
            for replica in self.replicas:  # one that does not count may hold NaN, of which 0 x NaN would remain
                own = mix * theta[replica] if mix and sent.weights[replica] > 0 else 0.0
                theta[replica] = own + (1 - mix if sent.weights[replica] > 0 else 1.0) * self.anchor[block]
        self.count += part == len(self.turns) - 1

    def finish(self) -> None:
        for part, turns in enumerate(self.turns):
            if turns and turns[-1] + self.sync.schedule.steps > self.last:
                self.use(part, self.sync.schedule.alpha)
        newest = [turns[-1] if turns else min(self.warmup, self.last) for turns in self.turns]
        has_turned = any(self.turns)
        if min(newest) == self.last and not (has_turned and self.sync.schedule.alpha > 0):
            return
        lrs = [self.rates.at(step) for step in range(min(newest) + 1, self.last + 1)]
        for part in range(len(self.turns)):
            for block in self.of(part):
                self.sent[block] = self.sent_from(block, [lrs for _ in self.replicas])
            self.use(part, 0.0)
