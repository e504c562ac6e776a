"""Tests of reductions that weigh replicas by tokens or norms, on numbers that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from llmtrain.sync.local_steps import LocalSteps, merge_tokens
from llmtrain.sync.reductions.weighted_means import MedianNorm, Radial, TokenWeighted

NOTHING = torch.zeros((0, 0))


def column(*norms: float) -> torch.Tensor:
    return torch.tensor(norms, dtype=torch.float64)[:, None]


def rounds(*done: tuple[int, int]) -> list[LocalSteps]:
    return [LocalSteps(steps=steps, tokens=tokens) for steps, tokens in done]


def test_twice_the_tokens_in_as_many_steps_count_four_times_and_in_twice_the_steps_twice() -> None:
    found = TokenWeighted().weigh_blocks([0, 3], NOTHING, rounds((10, 100), (10, 200), (20, 200), (0, 0)))
    assert found.weights[:, 1].tolist() == pytest.approx([1 / 7, 4 / 7, 2 / 7, 0.0])
    assert torch.equal(found.weights[:, 0], found.weights[:, 1])
    assert found.target_norms.isinf().all() and not found.anomalous.any()


def test_steps_that_a_rollback_has_undone_still_count_as_steps() -> None:
    """A replica that was reset in the middle of a round counts a quarter, as docs/methods.md says."""
    found = TokenWeighted().weigh_blocks([0], NOTHING, rounds((100, 1000), (100, 500)))
    assert found.weights.flatten().tolist() == [0.8, 0.2]


@pytest.mark.parametrize("replicas", range(1, 9))
def test_equal_work_has_the_weights_of_the_mean_to_the_last_bit(replicas: int) -> None:
    for done in ((7, 1013), (0, 0)):
        found = TokenWeighted().weigh_blocks([0], NOTHING, rounds(*[done] * replicas))
        assert found.weights.flatten().tolist() == [1 / replicas] * replicas


def test_the_mean_direction_has_the_mean_norm() -> None:
    radial, parts = Radial(2), torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    found = radial.weigh_blocks([0], parts.norm(dim=1)[:, None], rounds((1, 1), (1, 1)))
    mean = (found.weights * parts).sum(0)
    mean *= radial.factor(mean.square().sum(), found.target_norms.item())
    torch.testing.assert_close(mean, torch.tensor([math.sqrt(2), math.sqrt(2)], dtype=torch.float64))


def test_directions_count_of_replicas_that_moved_and_norms_of_all_that_are_finite() -> None:
    found = Radial(4).weigh_blocks([0], column(4.0, 0.0, math.nan, 2.0), rounds(*[(1, 1)] * 4))
    assert found.target_norms.tolist() == [2.0]
    assert found.weights.flatten().tolist() == [0.25, 0.0, 0.0, 0.5]
    assert found.anomalous.flatten().tolist() == [False, False, True, False]


@pytest.mark.parametrize("norms", [(0.0, 0.0), (math.inf, math.nan)])
def test_without_a_direction_there_is_no_length(norms: tuple[float, ...]) -> None:
    found = Radial(4).weigh_blocks([0], column(*norms), rounds((1, 1), (1, 1)))
    assert found.weights.flatten().tolist() == [0.0, 0.0] and found.target_norms.isinf().all()


def test_directions_that_cancel_each_other_are_lengthened_by_the_number_of_replicas() -> None:
    squares = torch.tensor([0.0, 1e-20, 0.25, 36.0], dtype=torch.float64)
    assert Radial(4).factor(squares, 3.0).tolist() == [4.0, 4.0, 4.0, 0.5]


@pytest.mark.parametrize(
    ("norms", "median", "counted"),
    [((1.0, 8.0, 2.0), 2.0, 3), ((1.0, 8.0, 2.0, 4.0), 3.0, 4), ((math.inf, 8.0, 2.0), 5.0, 2), ((5.0,), 5.0, 1)],
)
def test_all_are_rescaled_to_the_median(norms: tuple[float, ...], median: float, counted: int) -> None:
    found = MedianNorm().weigh_blocks([0], column(*norms), rounds(*[(1, 1)] * len(norms)))
    rescaled = (found.weights.flatten() * torch.tensor(norms, dtype=torch.float64)).nan_to_num(0.0).tolist()
    expected = [median / counted if math.isfinite(norm) else 0.0 for norm in norms]
    assert rescaled == pytest.approx(expected)


def test_a_median_of_nothing_weighs_nobody() -> None:
    found = MedianNorm().weigh_blocks([0], column(math.nan, math.inf), rounds((1, 1), (1, 1)))
    assert found.weights.flatten().tolist() == [0.0, 0.0] and found.anomalous.all()


def test_tokens_of_a_replica_are_shared_by_its_new_ranks() -> None:
    states = [{"local_steps": [LocalSteps(3, 0.1, 0.3, tokens).state()], "sent": [None]} for tokens in (40, 20)]
    assert merge_tokens(states, 4) == {"local_steps": [LocalSteps(3, 0.1, 0.3, 15.0).state()], "sent": [None]}
