"""Oracles of the schedules that use a mean some time after it was sent: CO2 and Streaming DiLoCo."""

from __future__ import annotations

from itertools import pairwise

from tests.distributed.oracle import Oracle, Sent
from tests.distributed.oracle_timed import TimedOracle


class FragmentOracle(Oracle):
    """Oracle of a model whose parts take turns. If rounds are of steps, every turn of the run is known beforehand."""

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

    @property
    def last(self) -> int:
        return self.rates.total_steps

    def _turn(self, start: int, end: int, part: int) -> int:
        """Return the step of a part's turn: ceil((p + 1) H / P) steps into the round, in integers."""
        parts = self.sync.schedule.fragments
        return start + ((part + 1) * (end - start) + parts - 1) // parts

    def of(self, part: int) -> list[int]:
        return [block for block in self.blocks if self.fragment_of[block] == part]


def mean_rate(lrs: list[list[float]]) -> float:
    """Return the mean learning rate of all replicas' steps of a round; 0 if there were none."""
    return sum(map(sum, lrs)) / max(1, sum(map(len, lrs)))


class DelayedOracle(FragmentOracle):
    """Oracle of CO2: a part's turn uses what was sent at the part's previous turn."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[list[dict[int, Sent]]] = [[] for _ in self.turns]  # [part][turn], by block
        self.done = [[0 for _ in self.replicas] for _ in self.turns]  # local steps at the newest turn, [part][replica]

    def after_step(self, step: int) -> None:
        for part, turns in enumerate(self.turns):
            if step in turns:
                self.take_turn(part)

    def synchronize(self) -> None:
        """Take the turn of part 0 when replicas meet in timed rounds."""
        self.take_turn(0)

    def take_turn(self, part: int) -> None:
        lrs = [of_replica[done:] for of_replica, done in zip(self.lrs, self.done[part], strict=True)]
        self.sent[part].append({block: self.sent_from(block, lrs) for block in self.of(part)})
        self.done[part] = [len(of_replica) for of_replica in self.lrs]
        if len(self.sent[part]) > 1:
            then, now = (mean_rate(self.lrs_of(part, which)) for which in (-2, -1))
            has_gap = self.sync.schedule.gap_penalty and now > 0  # a round whose rates are 0 has no gap
            self.use(part, -2, max(1.0, then / now) if has_gap else 1.0)
        for block in self.of(part):
            self.restart(block)

    def lrs_of(self, part: int, which: int) -> list[list[float]]:
        return next(iter(self.sent[part][which].values())).lrs

    def use(self, part: int, which: int, gap: float) -> None:
        for block, sent in self.sent[part][which].items():
            if sent.mean is not None:
                self.outer_step(block, sent.mean / gap, self.unit(sent.lrs))
        self.count += part == len(self.turns) - 1

    def finish(self) -> None:
        for part in range(len(self.turns)):
            if any(len(of_replica) > done for of_replica, done in zip(self.lrs, self.done[part], strict=True)):
                self.take_turn(part)
            if self.sent[part]:
                self.use(part, -1, 1.0)
                for block in self.of(part):
                    self.restart(block)


class TimedDelayedOracle(TimedOracle, DelayedOracle):
    """Oracle of timed rounds in which the mean of each round is used at the end of the next one."""


class OverlappedOracle(FragmentOracle):
    """Oracle of Streaming DiLoCo, in which the step after which a mean is used is also known beforehand."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sent: dict[int, Sent] = {}  # by block, of the newest turn
        self.is_sent = [False for _ in self.turns]  # by part: its newest mean is still to be used
        self.since = [min(self.warmup, self.last) for _ in self.turns]  # by part: later steps are in no mean yet

    def after_step(self, step: int) -> None:
        for part, turns in enumerate(self.turns):
            for number, turn in enumerate(turns):
                next_turn = turns[number + 1] if number + 1 < len(turns) else self.last + 1
                due = min(turn + self.sync.schedule.steps, next_turn)
                if step == due > turn and self.is_sent[part]:
                    self.use_late(part, step)
                if step == turn:
                    self.send(part, step)
                    if due == turn:
                        self.use_late(part, step)

    def send(self, part: int, step: int) -> None:
        """Send part `part` after `step`, unless nothing was trained that a mean does not have or has not replaced."""
        lrs = [self.rates.at(trained) for trained in range(self.since[part] + 1, step + 1)]
        self.is_sent[part], self.since[part] = bool(lrs), step
        if lrs:
            for block in self.of(part):
                self.sent[block] = self.sent_from(block, [lrs for _ in self.replicas])

    def use_late(self, part: int, step: int) -> None:
        """Use the newest mean of a part after `step`. Without mixing, it replaces what was trained since."""
        self.use(part, self.sync.schedule.alpha)
        self.is_sent[part] = False
        if self.sync.schedule.alpha == 0:
            self.since[part] = step

    def use(self, part: int, mix: float) -> None:
        for block in self.of(part):
            sent, theta = self.sent[block], self.theta[block]
            if sent.mean is not None:
                self.outer_step(block, sent.mean, self.unit(sent.lrs))
            for replica in self.replicas:  # an excluded replica may hold NaN, and 0 x NaN is NaN
                own = mix * theta[replica] if mix and sent.weights[replica] > 0 else 0.0
                theta[replica] = own + (1 - mix if sent.weights[replica] > 0 else 1.0) * self.anchor[block]
        self.count += part == len(self.turns) - 1

    def finish(self) -> None:
        for part in range(len(self.turns)):
            if self.is_sent[part]:
                self.use_late(part, self.last)
        rounds, has_short_round = self.count, False
        for part, turns in enumerate(self.turns):
            self.send(part, self.last)
            if self.is_sent[part]:
                has_short_round = True
                self.use(part, 0.0)
            elif turns:  # nothing was trained since the part's last turn
                for block in self.of(part):
                    self.theta[block][:] = self.anchor[block]
        self.count = rounds + has_short_round
