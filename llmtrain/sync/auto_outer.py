"""Outer step that fits the number and the length of rounds (`sync.outer: auto`)."""

from __future__ import annotations

from llmtrain.config import NesterovSection, OuterRoundsSection

COVERED_SHARE = 1 / 5
"""Rounds that the momentum averages over, as a share of all rounds."""
FULL_ROUND = 30
"""Local steps per round from which the momentum is not reduced."""
MAX_COVERED = 10.0
"""Maximum number of rounds that the momentum averages over, which is a momentum of 0.9."""
LR_WITHOUT_MOMENTUM, LR_PER_MOMENTUM = 1.0, -0.375
"""Outer learning rate, as a line: 1 without momentum, which is plain averaging, and 0.7 with a momentum of 0.8."""
WARMUP_SHARE = 1 / 6
"""Rounds of the momentum's warm-up, as a share of all rounds."""


def outer_for(rounds: int, steps: float) -> NesterovSection:
    """Return the outer optimizer's settings for a run of `rounds` rounds of `steps` local steps each.

    In the study (benchmarks/results/study: DiLoCo with AdamW, 4 replicas, 26 rounds of 30 steps, one seed), the lowest loss of 18
    settings was learning rate 0.7 and momentum 0.8 with a warm-up of the momentum over 4 rounds. The scale for other numbers and
    lengths of rounds is our choice: with fewer or shorter rounds, the step is closer to plain averaging. The study then ran the rule
    with three seeds. With AdamW and 4 replicas, its mean loss is below that of the setting that trials had
    chosen, for DiLoCo with 26 and 52 rounds of 30 steps and 78 of 10, and for EDiT with 26 and 78. With 8 rounds of 100 steps,
    DiLoCo's is 0.008 above it. With 2 replicas and with MuLoCo, it is 0.020 and 0.058 above it; less momentum is better there
    (docs/results.md). For fewer rounds, trials of PALSGD partly contradict the rule: in 8 rounds of 30 steps, learning rate 1.0 and
    momentum 0.2, near its values, ended 0.09 and 0.10 above 0.7 and 0.5, but in 3 rounds of 100 steps 0.02 and 0.04 below.
    """
    covered = max(1.0, min(MAX_COVERED, rounds * COVERED_SHARE) * min(1.0, steps / FULL_ROUND))
    momentum = round(1 - 1 / covered, 2)
    lr = round(LR_WITHOUT_MOMENTUM + LR_PER_MOMENTUM * momentum, 2)
    return NesterovSection(
        lr=lr, momentum=momentum, rounds=OuterRoundsSection(momentum_warmup=round(rounds * WARMUP_SHARE))
    )
