"""Tests of EDiT's penalty on synthetic norms: which are excluded, for how long, what a resume keeps, and what is clipped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from llmtrain.config import EditPenaltySection
from llmtrain.sync.reductions.edit_penalty import EditPenalty

ROUNDS, CHANGE = 120, 60


def noise(deviation: float, seed: int = 0) -> np.ndarray:
    return np.exp(deviation * np.random.default_rng(seed).standard_normal(ROUNDS))


def left_out(
    norms: np.ndarray, lr_sums: np.ndarray | None = None, steps: np.ndarray | None = None, **choices: float | str | None
) -> np.ndarray:
    """Return, by round, whether the only block of the only replica is excluded."""
    penalty = EditPenalty(EditPenaltySection(**choices), 1, 1)
    sums, counts = (np.ones(len(norms)) if given is None else given for given in (lr_sums, steps))
    found = [
        penalty.weigh(torch.tensor([[norm]]), torch.tensor([count]), torch.tensor([lr_sum])).anomalous.item()
        for norm, count, lr_sum in zip(norms, counts, sums, strict=True)
    ]
    return np.array(found)


@pytest.mark.parametrize("change", [60, 300])
def test_a_lasting_rise_is_followed_within_15_rounds(change: int) -> None:
    """The recipe's key `statistics` states this bound. Each block has its own noise and size of rise. The rise comes early, or after
    the bias correction has faded."""
    deviations, factors = np.meshgrid([0.01, 0.03, 0.1, 0.2], [1.1, 1.25, 2.0, 8.0, 30.0, 60.0, 100.0])
    deviations, factors = deviations.ravel(), factors.ravel()
    norms = np.exp(deviations * np.random.default_rng(0).standard_normal((change + 40, len(factors))))
    norms[change:] *= factors
    penalty, ones = EditPenalty(EditPenaltySection(), 1, len(factors)), torch.ones(1)
    found = np.stack([penalty.weigh(torch.from_numpy(of_round)[None], ones, ones).anomalous[0] for of_round in norms])
    assert found[change].mean() > 0.7, "most rises are excluded at first"
    assert found[change : change + 15].sum(0).max() <= 14
    assert found[change + 15 :].mean() < 0.01, "later, only chance excludes a norm"


@pytest.mark.parametrize(("deviation", "factor"), [(0.01, 1.1), (0.03, 1.25), (0.1, 8.0)])
def test_a_lasting_change_locks_the_papers_rule_in(deviation: float, factor: float) -> None:
    norms = noise(deviation)
    norms[CHANGE:] *= factor
    assert left_out(norms, statistics="paper")[CHANGE:].all()


@pytest.mark.parametrize("statistics", ["adaptive", "paper"])
def test_single_spikes_are_left_out_every_time(statistics: str) -> None:
    norms = noise(0.03)
    spikes = np.arange(CHANGE, ROUNDS, 10)
    norms[spikes] *= 5
    found = left_out(norms, statistics=statistics)
    assert found[spikes].all() and found.sum() <= len(spikes) + 2


def test_norms_that_grow_with_the_learning_rates_are_ordinary() -> None:
    """Rounds of QSR grow, and a replica of A-EDiT that becomes faster takes more steps per round."""
    sums = np.where(np.arange(ROUNDS) < CHANGE, 1.0, 4.0)
    norms = noise(0.03) * sums
    assert left_out(norms, sums).sum() <= 2
    assert left_out(norms, sums, statistics="paper")[CHANGE:].all()


@pytest.mark.parametrize("power", [0.5, 0.75, 1.0])
def test_a_shorter_round_is_ordinary_and_a_spike_in_it_is_not(power: float) -> None:
    """Steps partly cancel each other, so a norm grows with a power of their number."""
    steps = np.full(ROUNDS, 30.0)
    steps[[CHANGE, -1]] = 1.0
    steps[CHANGE + 20 : -1] = 12.0
    norms = noise(0.03) * steps**power
    assert left_out(norms, steps, steps).sum() <= 2 and not left_out(norms, steps, steps)[-1]
    norms[-1] *= 8
    assert left_out(norms, steps, steps)[-1]


def test_a_block_that_begins_to_move_is_ordinary() -> None:
    norms = np.where(np.arange(ROUNDS) < CHANGE, 0.0, noise(0.1))
    assert left_out(norms)[: CHANGE + 10].sum() == 0
    assert left_out(norms, statistics="paper")[CHANGE:].all()


def test_norms_that_never_varied_give_no_scale() -> None:
    norms = np.where(np.arange(ROUNDS) < CHANGE, 1.0, 1.0 + noise(0.1))
    assert left_out(norms)[CHANGE:].sum() <= 10
    assert left_out(norms, statistics="paper")[CHANGE:].all()


def test_a_round_without_a_learning_rate_has_norms_as_they_are() -> None:
    norms = noise(0.1)
    assert (left_out(norms, np.zeros(ROUNDS)) == left_out(norms)).all()


def test_rounds_in_a_row_are_counted_and_go_on_after_a_resume() -> None:
    section = EditPenaltySection(min_rounds=2, z=3.0)
    ones, penalty = torch.ones(2), EditPenalty(section, 2, 1)
    rows = [[1.0, 1.0], [1.1, 1.1], [9.0, 1.0], [math.nan, 1.05], [1.0, 1.0], [math.inf, 1.0]]
    for row, expected in zip(rows, ([0, 0], [0, 0], [1, 0], [2, 0], [0, 0], [1, 0]), strict=True):
        resumed = EditPenalty(section, 2, 1)
        resumed.load_state_dict(penalty.state_dict())
        penalty = resumed
        penalty.weigh(torch.tensor(row, dtype=torch.float64)[:, None], ones, ones)
        assert penalty.excluded[:, 0].tolist() == expected


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_a_mean_is_measured_only_where_it_may_exceed_the_clip(temperature: float | None) -> None:
    """Where the bound rules out that a mean exceeds the clip, the mean does not. The pseudo-gradients have random directions, and an
    infinite one is excluded."""
    penalty = EditPenalty(EditPenaltySection(clip=1.0, temperature=temperature), replicas=3, blocks=400)
    drawn = torch.Generator().manual_seed(0)
    parts = torch.randn(3, 400, 2, generator=drawn, dtype=torch.float64)
    parts[0, 7] = math.inf
    norms = parts.norm(dim=2)
    found = penalty.weigh(norms, torch.ones(3), torch.ones(3))
    means = (found.weights[..., None] * parts.nan_to_num(0.0, 0.0, 0.0)).sum(0).norm(dim=1)
    may_clip = found.target_norms.isfinite()
    assert (means > 1).sum() > 5 and may_clip[means > 1].all()
    assert 40 < may_clip.sum() < 360 and found.anomalous.nonzero().tolist() == [[0, 7]]
    unclipped = EditPenalty(EditPenaltySection(clip=None, temperature=temperature), replicas=3, blocks=400)
    assert unclipped.weigh(norms, torch.ones(3), torch.ones(3)).target_norms.isinf().all()


def test_a_mean_near_the_clip_is_measured() -> None:
    penalty = EditPenalty(EditPenaltySection(clip=2.0), replicas=2, blocks=3)
    norms = torch.tensor([[1.97, 2.1, 2.0], [1.97, 1.9, 2.0]], dtype=torch.float64)
    assert penalty.weigh(norms, torch.ones(2), torch.ones(2)).target_norms.tolist() == [math.inf, 2.0, 2.0]


def test_a_penalty_clips_long_means_alone() -> None:
    penalty = EditPenalty(EditPenaltySection(clip=1.0), replicas=2, blocks=2)
    factors = penalty.factor(torch.tensor([0.25, 1e6]), 1.0)
    torch.testing.assert_close(factors, torch.tensor([1.0, 1e-3]))
