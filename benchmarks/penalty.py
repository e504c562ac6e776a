"""Rounds that EDiT's penalty excludes when pseudo-gradient norms change, with both rules for its running statistics.

    python benchmarks/penalty.py          # a few seconds; no training

The norms of one block are synthetic: lognormal noise of 3 % around a level that jumps, drifts, has single spikes, or follows the
growing rounds of QSR. Two more cases are an A-EDiT replica that becomes twice as fast, and one whose rounds become three times as
short while its steps have random directions. The penalty weighs the norms round by round with its defaults (z = 3, ema = 0.02,
min_rounds = 10). The picture shows the norms, the threshold (mean + z std) in each round, and the rounds that are left out. With
`--write`, table and picture go to benchmarks/results/penalty/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from table import RESULTS, Row, markdown, parser, show, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS, CHANGE, NOISE = 240, 80, 0.03
TRIALS = 2000
"""Runs for the rate of false alarms."""
COLUMNS = ("norms", "rounds", "left out: paper", "adaptive", "longest in a row: paper", "adaptive")


@dataclass(frozen=True)
class Case:
    """Levels of the norms, summed learning rates and numbers of steps, by round."""

    level: np.ndarray
    lr_sums: np.ndarray
    steps: np.ndarray

    @property
    def norms(self) -> np.ndarray:
        return self.level * np.exp(NOISE * np.random.default_rng(0).standard_normal(len(self.level)))


@dataclass(frozen=True)
class Outcome:
    """The penalty's decision in each round, and its threshold in the unit of the norms."""

    left_out: np.ndarray
    threshold: np.ndarray

    @property
    def longest(self) -> int:
        """Largest number of consecutive rounds that are excluded."""
        return max(map(len, "".join(" x"[int(flag)] for flag in self.left_out).split()), default=0)


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    after, ones = np.arange(ROUNDS) >= CHANGE, np.ones(ROUNDS)
    drift = 1.01 ** np.maximum(0, np.arange(ROUNDS) - CHANGE)
    spikes = np.where(after & (np.arange(ROUNDS) % 20 == 0), 10.0, 1.0)
    faster, shorter = np.where(after, 2.0, 1.0), np.where(after, 1 / 3, 1.0)
    qsr_steps, qsr_sums = qsr_rounds()
    return {
        "jump to 8 times": Case(np.where(after, 8.0, 1.0), ones, ones),
        "drift of 1 % per round": Case(drift, ones, ones),
        "single spikes of 10 times": Case(spikes, ones, ones),
        "growing rounds of QSR": Case(qsr_sums, qsr_sums, qsr_steps),
        "A-EDiT replica twice as fast": Case(faster, faster, faster),
        "rounds three times as short": Case(np.sqrt(shorter), shorter, shorter),
    }


def qsr_rounds() -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the summed learning rates of QSR's rounds: cosine to 10 % in 10,000 steps, rounds from 9 to 900 steps."""
    from llmtrain.config import LRScheduleSection, QsrSection
    from llmtrain.lr import LRSchedule
    from llmtrain.sync.period import build_period

    rates = LRSchedule(1.0, 10_000, LRScheduleSection(kind="cosine", final_ratio=0.1))
    period = build_period(QsrSection(base=9, alpha=3.0), 0, rates)
    ends = [step for step in range(1, rates.total_steps + 1) if period.ends_round(step)]
    lrs = np.cumsum([0.0] + [rates.at(step) for step in range(1, rates.total_steps + 1)])
    return np.diff([0, *ends]).astype(float), np.diff(lrs[[0, *ends]])


def weigh(norms: np.ndarray, lr_sums: np.ndarray, steps: np.ndarray, statistics: str) -> Outcome:
    """Return the penalty's decisions on one replica's norms, weighed round by round. `statistics` is `paper` or `adaptive`."""
    import torch

    from llmtrain.config import EditPenaltySection
    from llmtrain.sync.reductions.edit_penalty import EditPenalty

    section = EditPenaltySection(statistics=statistics)
    penalty = EditPenalty(section, 1, 1)
    left_out, threshold = [], []
    for norm, lr_sum, count in zip(norms, lr_sums, steps, strict=True):
        usual = float(penalty.steps.mean) or count
        unit = lr_sum * max(1.0, usual / count) ** 0.5 if statistics == "adaptive" else 1.0
        known = int(penalty.norms.count) >= section.min_rounds
        bound = float(penalty.norms.mean + section.z * penalty.norms.variance.sqrt()) * unit
        threshold.append(bound if known else np.nan)
        verdict = penalty.weigh(torch.tensor([[norm]]), torch.tensor([count]), torch.tensor([lr_sum]))
        left_out.append(bool(verdict.anomalous))
    return Outcome(np.array(left_out), np.array(threshold))


def false_alarms(statistics: str, trials: int) -> float:
    """Return the share of rounds 11 to 30 that are excluded in runs whose norms are only noise: lognormal(0.1)."""
    norms = np.exp(0.1 * np.random.default_rng(1).standard_normal((trials, 30)))
    return float(np.mean([weigh(row, np.ones(30), np.ones(30), statistics).left_out[10:] for row in norms]))


def draw(outcomes: dict[str, dict[str, Outcome]]) -> Figure:
    """Draw the picture, with a row per case and a column per rule."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 12.0), layout="constrained")
    axes = figure.subplots(len(outcomes), 2, sharex=True)
    for row, (name, by_rule) in zip(axes, outcomes.items(), strict=True):
        norms = cases()[name].norms
        for axis, (rule, outcome) in zip(row, by_rule.items(), strict=True):
            rounds = np.arange(len(norms))
            axis.semilogy(rounds, norms, ".", color="#0072b2", markersize=3, label="norm")
            axis.semilogy(rounds, outcome.threshold, color="#555555", linewidth=1.0, label="threshold")
            out = outcome.left_out
            axis.semilogy(rounds[out], norms[out], "x", color="#d55e00", markersize=5, label="left out")
            axis.set_title(f"{name}, {rule}: {out.sum()} of {len(out)} left out", fontsize=9)
    axes[0, 0].legend(fontsize=8)
    figure.supxlabel("round", fontsize=9)
    figure.supylabel("norm of the pseudo-gradient", fontsize=9)
    return figure


def main() -> None:
    """Weigh all cases, show the table and draw the picture."""
    options = parser(__doc__)
    options.add_argument("--picture", type=Path, help="file of the picture, if it is not written to the results")
    options.add_argument("--trials", type=int, default=TRIALS, help="runs for the rate of false alarms")
    chosen = options.parse_args()
    rules = ("paper", "adaptive")
    outcomes = {
        name: {rule: weigh(case.norms, case.lr_sums, case.steps, rule) for rule in rules}
        for name, case in cases().items()
    }
    rows: list[Row] = []
    for name, found in outcomes.items():
        counts = [str(found[rule].left_out.sum()) for rule in rules] + [str(found[rule].longest) for rule in rules]
        rows.append((name, str(len(found["paper"].left_out)), *counts))
    show("Rounds that the penalty leaves out", COLUMNS, rows)
    shares = " and ".join(f"{100 * false_alarms(rule, chosen.trials):.2f} % ({rule})" for rule in rules)
    alarms = f"False alarms, lognormal(0.1) norms, rounds 11 to 30 of {chosen.trials:,} runs: {shares}."
    print(alarms)
    if chosen.write:
        folder = RESULTS / "penalty"
        picture = "![norms, thresholds and rounds left out](penalty.png)"
        write_page(folder, "Rounds that EDiT's penalty leaves out", [markdown(COLUMNS, rows), alarms, picture])
        draw(outcomes).savefig(folder / "penalty.png", dpi=110)
    elif chosen.picture:
        draw(outcomes).savefig(chosen.picture, dpi=110)


if __name__ == "__main__":
    main()
