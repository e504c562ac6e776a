"""Outer step chosen by the number and the length of rounds (`sync.outer: auto`)."""

from __future__ import annotations

from llmtrain.config import NesterovSection, OuterRoundsSection

COVERED_SHARE = 1 / 5
"""Rounds over which the momentum averages, as a fraction of all rounds."""
FULL_ROUND = 30
"""Local steps per round from which the momentum is not reduced."""
MAX_COVERED = 10.0
"""Maximum number of rounds over which the momentum averages. 10 rounds correspond to a momentum of 0.9."""
LR_WITHOUT_MOMENTUM, LR_PER_MOMENTUM = 1.0, -0.375
"""Coefficients of the outer learning rate as a linear function of the momentum: 1 without momentum, which is plain averaging, and
0.7 with a momentum of 0.8."""
WARMUP_SHARE = 1 / 6
"""Rounds of the momentum's warm-up, as a fraction of all rounds."""


def outer_for(rounds: int, steps: float) -> NesterovSection:
    """Return the outer optimizer's settings for a run of `rounds` rounds of `steps` local steps each.

    The rule extends one result of the study (benchmarks/results/study). For DiLoCo with AdamW, 4 replicas and 26 rounds of 30 steps
    (one seed), learning rate 0.7 and momentum 0.8 with a momentum warm-up over 4 rounds gave the lowest loss of 18 settings. How the
    rule scales with the number and length of rounds is our choice: with fewer or shorter rounds, the step is closer to plain
    averaging.

    The study then compared the rule with the settings that trials had chosen, by the mean loss of three seeds:

    - With AdamW and 4 replicas, the rule is better for DiLoCo in 26 and 52 rounds of 30 steps and in 78 of 10, and for EDiT in 26
      and 78 rounds. For DiLoCo in 8 rounds of 100 steps, its loss is 0.008 higher.
    - In 260 rounds of 3 steps, for which the rule is plain averaging, the loss with a momentum of 0.4 that warms up over 43 rounds
      is 0.018 higher.
    - With 2 replicas, its loss is 0.020 higher, and with MuLoCo 0.058. Less momentum is better there (docs/results.md).

    For fewer rounds, trials of PALSGD with pull probabilities of 0.1 and 0.2 partly contradict the rule. Learning rate 1.0 and
    momentum 0.2, which are near its values, gave losses 0.09 and 0.10 higher than 0.7 and 0.5 in 7 and 8 rounds of 30 steps, but
    0.04 and 0.02 lower in 3 rounds of 100 steps.
    """
    covered = max(1.0, min(MAX_COVERED, rounds * COVERED_SHARE) * min(1.0, steps / FULL_ROUND))
    momentum = round(1 - 1 / covered, 2)
    lr = round(LR_WITHOUT_MOMENTUM + LR_PER_MOMENTUM * momentum, 2)
    return NesterovSection(
        lr=lr, momentum=momentum, rounds=OuterRoundsSection(momentum_warmup=round(rounds * WARMUP_SHARE))
    )
