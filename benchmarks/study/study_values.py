"""Values of the methods' own keys that the study's trials compare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QsrRounds:
    """QSR's period, whose growth rate is in units of the learning rate."""

    base: int
    growth: float
    """alpha, in units of peak learning rate x base^(1 / power): with 1, rounds grow as soon as the learning rate falls."""
    power: int = 2

    def key(self, lr: float) -> str:
        """Return the key with the period for a peak learning rate."""
        power = "" if self.power == 2 else f", power: {self.power}"
        alpha = self.growth * lr * self.base ** (1 / self.power)
        return f"sync.period={{kind: qsr, base: {self.base}, alpha: {alpha:.6g}{power}}}"


Overrides = tuple[str | QsrRounds, ...]
"""Keys of a recipe, as `KEY=VALUE`."""


def nesterov(lr: float, momentum: float, warmup: int = 0) -> Overrides:
    """Return an outer Nesterov step whose momentum reaches its value after `warmup` rounds."""
    return (f"sync.outer={{kind: nesterov, lr: {lr}, momentum: {momentum}, rounds: {{momentum_warmup: {warmup}}}}}",)


def nesterovs(*choices: tuple[float, ...]) -> tuple[Overrides, ...]:
    """Return an outer Nesterov step for each (lr, momentum) or (lr, momentum, warmup)."""
    return tuple(nesterov(*choice) for choice in choices)


def heavy_ball(lr: float, momentum: float, warmup: int = 0) -> Overrides:
    """Return the keys of the outer heavy-ball step of SlowMo and CO2."""
    return (
        f"sync.outer.lr={lr}",
        f"sync.outer.momentum={momentum}",
        f"sync.outer.rounds.momentum_warmup={warmup}",
    )


HEAVY_BALLS = tuple(
    heavy_ball(*choice) for choice in ((1.0, 0.3), (1.0, 0.7), (0.7, 0.5), (0.7, 0.7), (1.0, 0.7, 4), (0.5, 0.7))
)

QSR = ((4, 1.0), (20, 1.0), (30, 1.0), (10, 0.5), (20, 0.5), (30, 0.5))
"""(Base, growth) of QSR's rounds in trials, in addition to (10, 1)."""
PULL = "sync.pull.probability="
OUTER: dict[str, tuple[Overrides, ...]] = {
    "synchronous": (),
    "local_sgd": (),
    "des_loc": tuple(
        (f"sync.moments={{first: {first}, second: {second}}}",)
        for first, second in ((1, 1), (1, 3), (2, 4), (3, 3), (1, "null"), ("null", 3))
    ),
    "gpa": tuple(
        (f"sync.outer={{kind: gpa, decay: {decay}, share: {share}}}",)
        for decay, share in ((0.9934, 0.7), (0.984, 0.7), (0.96, 0.7), (0.92, 0.7), (0.984, 0.9), (0.96, 0.9))
    ),
    "post_local_sgd": tuple((f"sync.warmup_until_lr={lr}",) for lr in (0.25, 0.75, 0.9)),
    "qsr": tuple((QsrRounds(*rounds),) for rounds in QSR),
    "qsr-power1": tuple((QsrRounds(*rounds, power=1),) for rounds in QSR),
    "slowmo": HEAVY_BALLS,
    "diloco": nesterovs((0.7, 0.9, 4), (0.7, 0.5), (0.4, 0.9), (0.4, 0.9, 4), (1.0, 0.5), (1.0, 0.8, 4)),
    "muloco": nesterovs((0.7, 0.6), (1.0, 0.5), (0.8, 0.8, 4), (0.6, 0.8), (1.0, 0.8, 4), (0.7, 0.9, 4)),
    "sparseloco": (
        ("sync.outer.lr=0.7",),
        ("sync.outer.lr=1.4",),
        ("sync.wire.keep=128",),
        ("sync.wire.keep=256",),
        ("sync.wire.feedback_decay=1.0",),
        ("sync.wire.feedback_decay=0.8",),
    ),
    "streaming_diloco": nesterovs((0.4, 0.9, 4), (0.7, 0.5), (0.2, 0.9), (0.7, 0.9, 4), (1.0, 0.5), (1.0, 0.8, 4)),
    "co2": HEAVY_BALLS,
    "palsgd": (
        nesterov(0.7, 0.9, 4),
        nesterov(0.7, 0.5),
        nesterov(1.0, 0.2),
        (*nesterov(0.7, 0.5), f"{PULL}0.1"),
        (*nesterov(1.0, 0.2), f"{PULL}0.1"),
        (*nesterov(0.7, 0.5), f"{PULL}0.05"),
    ),
    "edit": (of_edit := nesterovs((0.8, 0.85, 4), (0.7, 0.5), (0.4, 0.9), (0.4, 0.9, 4), (1.0, 0.5), (1.0, 0.8, 4))),
    "a_edit": of_edit,
    "wagma": (
        ("sync.schedule.group_size=4",),
        ("sync.period.every=10",),
        ("sync.schedule.group_size=4", "sync.period.every=10"),
    ),
}
"""Values of a method's own keys in trials, in addition to its preset's. A method with fewer than six tries more inner learning
rates instead."""
ALWAYS: dict[str, Overrides] = {
    "qsr": (QsrRounds(10, 1.0),),
    "qsr-power1": (QsrRounds(10, 1.0, power=1),),
    "palsgd": (f"{PULL}0.2",),
    "streaming_diloco": ("sync.schedule.fragments=3",),
    "a_edit": ("sync.period.min_steps=60",),
    "wagma": ("sync.period.every=30",),
}
"""Keys of all of a method's trials: those that its preset leaves open, that do not fit the model's three blocks in the preset, or
on which the number of steps depends. `OUTER` may replace them."""
SHORT_ROUNDS = 5
"""Steps of the longest round whose few local steps an outer momentum of 0.9 would amplify too much."""
IN_SHORT_ROUNDS: dict[str, Overrides] = {"diloco": nesterov(0.7, 0.5)}
"""Keys of the first trials in short rounds, in place of the preset's. `OUTER` may replace them."""
