"""Tests of resharding: the rules that turn the values of a checkpoint's ranks into those of another mesh."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from llmtrain.config import EditPenaltySection
from llmtrain.errors import CheckpointError
from llmtrain.reshard import MeshChange, by_replica, require_equal, rules_of
from llmtrain.running_moments import RunningMoments
from llmtrain.sync.local_steps import LocalSteps, mean_local_steps
from llmtrain.sync.reductions.edit_penalty import EditPenalty
from llmtrain.sync.schedules.fragments import FragmentSchedule
from llmtrain.sync.sync_stats import SYNC_STATS_RULES
from llmtrain.train.checkpoint_reader import CheckpointReader
from llmtrain.train.metrics import METRICS_RULES
from llmtrain.train.state import TrainState

MESHES = [(2, 2), (4, 1), (1, 4), (3, 1), (2, 1), (2, 3), (1, 1)]
RULES = {
    **rules_of(TrainState),
    **METRICS_RULES,
    "loader": by_replica(require_equal),
    "method": {
        "report": SYNC_STATS_RULES,
        "period": by_replica(lambda states: "of all"),
        "schedule": by_replica(len),
    },
}


def progress_of(replica: int, shard: int) -> dict[str, Any]:
    """Return values that a rank may have stored. No two ranks have the same ones."""
    rank = 10 * replica + shard
    return {
        "step": 7 + replica,
        "loader": {"position": 96},
        "gradients": 5 + replica,
        "skipped": 1 + replica,
        "skipped_in_a_row": 0,
        "predicted_tokens": 1001 + rank,
        "train_seconds": 30.0 + rank,
        "virtual_seconds": 0.0,
        "gradient_wait_seconds": 0.5 + rank,
        "first_eval": {"loss": 5.0, "tokens": 64},
        "last_eval": {"loss": 4.0, "tokens": 64},
        "last_evaluated": 6,
        "last_line": {"train/loss": 4.5},
        "traffic": {"bytes": 1e6 + rank, "seconds": 3.0 + rank},
        "other_traffic": {"bytes": 1e3 + rank, "seconds": 1.0 + rank},
        "method": {
            "report": {
                "count": 2,
                "anomalies": 1,
                "rollbacks": 0,
                "longest_exclusion": 0,
                "late": 4 + replica,
                "seconds": 2.0,
                "exposed_seconds": 1.0 + rank,
                "wait_seconds": 0.5 + rank,
                "weights_max": 0.5,
                "slowest_replica": 1,
                "mean_squared": 0.25 + shard,
                "spread_squared": 0.5 + rank,
            },
            "period": f"of {replica}",
            "schedule": {},
        },
    }


def on(old: tuple[int, int], new: tuple[int, int]) -> tuple[list[dict], list[dict]]:
    """Return the values of all ranks of the old mesh, and those of all ranks of the new one after resharding."""
    ranks = [progress_of(replica, shard) for replica in range(old[0]) for shard in range(old[1])]
    places = [(replica, shard) for replica in range(new[0]) for shard in range(new[1])]
    return ranks, [MeshChange(*old, *new, *place, global_step=9).apply(RULES, ranks) for place in places]


def column(ranks: list[dict], *names: str) -> np.ndarray:
    for name in names:
        ranks = [rank[name] for rank in ranks]
    return np.array(ranks)


@pytest.mark.parametrize("new", MESHES, ids=str)
@pytest.mark.parametrize("old", [(2, 2), (4, 1), (3, 2), (1, 1)], ids=str)
def test_what_is_logged_next_stays_what_it_would_have_been(old: tuple[int, int], new: tuple[int, int]) -> None:
    """Sums over ranks, sums over replicas and means, as log lines compute them, do not change."""
    before, after = on(old, new)
    assert column(after, "predicted_tokens").dtype == int
    assert column(after, "predicted_tokens").sum() == column(before, "predicted_tokens").sum()
    for names in [("traffic", "bytes"), ("other_traffic", "bytes")]:
        assert column(after, *names).sum() == pytest.approx(column(before, *names).sum(), rel=1e-14)
    report = ("method", "report")
    for names in [("skipped",), (*report, "late")]:
        counts = [column(ranks, *names).sum() / mesh[1] for ranks, mesh in ((before, old), (after, new))]
        assert counts[0] == pytest.approx(counts[1], rel=1e-14)
    for name in ("mean_squared", "spread_squared"):
        sums = [column(ranks, *report, name).sum() / mesh[0] for ranks, mesh in ((before, old), (after, new))]
        assert sums[0] == pytest.approx(sums[1], rel=1e-14)
    for names in [
        ("gradients",),
        ("gradient_wait_seconds",),
        (*report, "wait_seconds"),
        (*report, "exposed_seconds"),
        ("traffic", "seconds"),
    ]:
        assert column(after, *names).mean() == pytest.approx(column(before, *names).mean(), rel=1e-14)
    assert all(rank.keys() == before[0].keys() for rank in after), "nothing is dropped"


def test_the_same_mesh_changes_nothing() -> None:
    before, after = on((2, 3), (2, 3))
    assert after == before


def test_the_same_replicas_keep_what_is_their_own() -> None:
    _, after = on((2, 2), (2, 1))
    assert [(rank["step"], rank["gradients"], rank["method"]["period"]) for rank in after] == [
        (7, 5, "of 0"),
        (8, 6, "of 1"),
    ]
    assert column(after, "predicted_tokens").tolist() == [2003, 2023]


def test_other_replicas_are_all_where_the_run_is() -> None:
    _, after = on((2, 2), (3, 1))
    assert {(rank["step"], rank["method"]["period"], rank["method"]["schedule"]) for rank in after} == {
        (9, "of all", 2)
    }
    assert [rank["loader"] for rank in after] == [{"position": 96}] * 3


def test_a_value_without_a_rule_is_not_dropped_in_silence() -> None:
    ranks = [progress_of(0, 0) | {"new": 1}]
    assert MeshChange(1, 1, 1, 1, 0, 0).apply(RULES, ranks)["new"] == 1
    with pytest.raises(AssertionError, match=r"\{'new'\} has either no value or no rule"):
        MeshChange(1, 1, 2, 1, 0, 0).apply(RULES, ranks)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ((2, 2), (2, 2), ""),
        ((2, 2), (4, 1), ", written by 2 replicas x 2 shards: 4 replicas start from their mean"),
        ((4, 1), (1, 2), ", written by 4 replicas x 1 shard: 1 replica starts from their mean"),
        ((1, 4), (2, 1), ", written by 1 replica x 4 shards: 2 replicas start from it"),
        ((2, 1), (2, 2), ", written by 2 replicas x 1 shard: the same replicas on 2 shards"),
    ],
    ids=str,
)
def test_the_console_says_what_was_done(old: tuple[int, int], new: tuple[int, int], text: str) -> None:
    assert MeshChange(*old, *new, 0, 0).describe() == text


def test_pooled_statistics_are_those_of_all_values_each_with_its_weight() -> None:
    ema, drawn = 0.3, np.random.default_rng(1)
    values, included = drawn.normal(3, 1, (6, 3, 2)), drawn.random((6, 3, 2)) < 0.7
    included[:, :, 1], included[:, 0, 0] = True, False
    moments = RunningMoments((3, 2), ema)
    for norms, include in zip(values, included, strict=True):
        moments.update(torch.tensor(norms), torch.tensor(include))
    penalty = EditPenalty(EditPenaltySection(ema=ema), 5, 2)
    steps = RunningMoments((3, 2), ema)
    steps.update(torch.tensor([[4.0, 4.0], [6.0, 6.0], [8.0, 8.0]]), torch.ones(3, 2, dtype=torch.bool))
    state = {"norms": moments.state_dict(), "steps": steps.state_dict(), "excluded": [[4, 0]] * 3}
    penalty.load_state_dict(penalty.resharded(state))
    torch.testing.assert_close(penalty.steps.mean, torch.full((5, 2), 6.0, dtype=torch.float64))
    assert penalty.excluded.tolist() == [[0, 0]] * 5
    for block in (0, 1):
        pool, weights = [], []
        for replica in range(3):
            kept = values[included[:, replica, block], replica, block]
            pool += kept.tolist()
            weights += [ema * (1 - ema) ** (len(kept) - 1 - i) for i in range(len(kept))]
        mean = np.average(pool, weights=weights)
        np.testing.assert_allclose(penalty.norms.mean[:, block], [mean] * 5, rtol=1e-13)
        variance = np.average((np.array(pool) - mean) ** 2, weights=weights)
        np.testing.assert_allclose(penalty.norms.variance[:, block], [variance] * 5, rtol=1e-12)
        assert penalty.norms.count[:, block].tolist() == [round(included[:, :, block].sum() / 3)] * 5


def test_statistics_of_no_round_are_none() -> None:
    penalty = EditPenalty(EditPenaltySection(), 2, 3)
    state = EditPenalty(EditPenaltySection(), 4, 3).resharded(penalty.state_dict())
    none = [[0] * 3] * 4
    moments = {key: none for key in ("count", "mean", "variance")}
    assert state == {"norms": moments, "steps": moments, "excluded": none}


def test_other_replicas_restart_what_any_was_excluded_from() -> None:
    """All new replicas start from a mean that includes an excluded replica's parameters. In timed rounds, replicas take
    different numbers of steps, of which the new state has the mean."""
    schedule = SimpleNamespace(weighing=SimpleNamespace(reduction=None))
    rounds = [LocalSteps(2, 0.1, 0.3), LocalSteps(4, 0.3, 0.9), LocalSteps(6, 0.2, 0.6)]
    states = [
        {
            "local_steps": [done.state(), LocalSteps().state()],
            "sent": [None, LocalSteps(2).state()],
            "penalty": None,
            "restarts": blocks,
        }
        for done, blocks in zip(rounds, ([], [3, 1], [1, 0]), strict=True)
    ]
    got = FragmentSchedule.resharded(schedule, states)
    assert got | {"local_steps": None} == states[0] | {"local_steps": None, "restarts": [0, 1, 3]}
    assert got["local_steps"][1] == LocalSteps().state()
    assert got["local_steps"][0] == pytest.approx(LocalSteps(4, 0.2, 0.6).state())


def test_a_mean_round() -> None:
    assert mean_local_steps([LocalSteps(3, 0.1, 0.3)] * 3) == LocalSteps(3, 0.1, 0.3)
    assert mean_local_steps([LocalSteps(3, 0.1, 0.5), LocalSteps(5, 0.3, 1.0)]) == LocalSteps(4, 0.2, 0.75)


def test_replicas_that_should_hold_the_same_and_do_not_are_a_defect() -> None:
    assert require_equal([{"a": 1}, {"a": 1}]) == {"a": 1}
    with pytest.raises(AssertionError, match="replicas differ"):
        require_equal([{"a": 1}, {"a": 2}])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    values = {"replica0.w": torch.full((3,), 0.1), "replica1.w": torch.full((3,), 0.1)}
    values |= {"replica2.w": torch.tensor([0.4, 1.0, 2.0]), "replica3.w": torch.tensor([0.1, torch.nan, 0.1])}
    values |= {"replica4.w": torch.full((3,), -0.0)}
    dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_a_mean_is_rounded_once(checkpoint: Path) -> None:
    stored, mean = CheckpointReader(checkpoint), torch.zeros(3)
    stored.read_mean(["replica0.w", "replica1.w", "replica0.w"], mean)
    assert torch.equal(mean, torch.full((3,), 0.1))
    stored.read_mean(["replica0.w", "replica2.w"], mean, factor=0.5)
    assert torch.equal(mean, torch.tensor([(0.1 + x) / 4 for x in (0.4, 1.0, 2.0)]))
    stored.read_mean(["replica4.w", "replica4.w"], mean)
    assert mean.signbit().all(), "equal replicas keep their bits"


def test_a_replica_that_is_not_finite_does_not_enter_a_mean(checkpoint: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"replica3.w holds a value that is not finite.* continue with 2 replicas"
    ) as caught:
        CheckpointReader(checkpoint).read_mean(["replica0.w", "replica3.w"], torch.zeros(3))
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_one_line_that_names_it(checkpoint: Path) -> None:
    stored = CheckpointReader(checkpoint)
    with pytest.raises(CheckpointError, match=r"can't be read: .*nowhere"):
        stored.read({"nowhere": torch.zeros(3)})
    [file] = checkpoint.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"can't be read: .*; delete it") as caught:
        stored.read({"replica0.w": torch.zeros(3)})
    assert str(checkpoint) in str(caught.value) and "\n" not in str(caught.value)
    (checkpoint / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="can't be read"):
        CheckpointReader(checkpoint)


def test_a_rank_continues_the_random_numbers_of_the_rank_at_its_position() -> None:
    """On both meshes, ranks are numbered replica by replica."""
    old = [[MeshChange(2, 3, 3, 2, replica, shard).same_rank for shard in range(2)] for replica in range(3)]
    assert old == [[0, 1], [3, 4], [None, None]]
    assert [MeshChange(2, 1, 1, 3, 0, shard).same_rank for shard in range(3)] == [0, None, None]
