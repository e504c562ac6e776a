"""Tests of reducing the numbers of all ranks to a line of metrics: sums, means, the slowest rank, and what ends a run."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from llmtrain.errors import TrainingError
from llmtrain.train import metric_gather
from llmtrain.train.metric_gather import DeviceNumbers, LogLine, MetricReducer

MESH = SimpleNamespace(
    replicas=2,
    shard_comms=SimpleNamespace(size=2),
    world=SimpleNamespace(size=4),
    device=SimpleNamespace(type="cpu"),
    all_ranks=SimpleNamespace(shares_memory=False),
)


def line(step: int = 10, **changed: list[float]) -> LogLine:
    """Return a log line with the gathered numbers of four ranks. `changed` replaces columns."""
    columns = {
        "steps": [5.0] * 4,
        "loss_sum": [100.0, 120.0, 140.0, 160.0],
        "tokens_total": [step * 25.0] * 4,
        "steps_total": [10.0, 10.0, 12.0, 12.0],
        "gradients": [4.0] * 4,
        "gradients_total": [8.0, 8.0, 9.0, 9.0],
        "late_total": [0.0, 0.0, 3.0, 3.0],
        "skipped_total": [0.0, 0.0, 2.0, 2.0],
        "skipped_in_a_row": [0.0] * 4,
        "predicted_tokens": [50.0] * 4,
        "padding": [0.0] * 4,
        "grad_norm_sum": [4.0, 4.0, 12.0, 12.0],
        "step_seconds": [2.0, 2.0, 2.0, 2.5],
        "data_seconds": [0.1] * 4,
        "peak_memory": [2.0**30] * 4,
        "reserved_memory": [0.0] * 4,
        "bytes_total": [1e6] * 4,
        "other_bytes_total": [1e3] * 4,
        "comm_seconds": [0.5] * 4,
        "exposed_seconds": [0.6] * 4,
        "wait_seconds": [0.1] * 4,
        "mean_squared": [2.0] * 4,
        "spread_squared": [1.0, 1.0, 2.0, 4.0],
        "stop": [0.0] * 4,
        "virtual_seconds": [0.0] * 4,
        "unwritten": [0.0] * 4,
        "fingerprint": [0.0] * 4,
        **changed,
    }
    gathered = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return LogLine(step=step, seconds=1.0, common={"train/lr": 1e-3}, numbers=DeviceNumbers({}), columns=gathered)


def test_ranks_without_a_gradient_do_not_lower_the_norm() -> None:
    """They have only pulled, or have skipped all steps."""
    reducer = MetricReducer(MESH, 1e9, None)
    assert (
        reducer.tags(line(gradients=[4.0, 4.0, 0.0, 0.0], grad_norm_sum=[8.0, 8.0, 0.0, 0.0]))["train/grad_norm"] == 2.0
    )
    assert math.isnan(reducer.tags(line(gradients=[0.0] * 4, grad_norm_sum=[0.0] * 4))["train/grad_norm"])


def test_tags_are_reduced_over_ranks():
    tags = MetricReducer(MESH, flops_per_token=1e9, peak=1e12).tags(line())
    assert tags["train/loss"] == pytest.approx(520 / 200)
    assert tags["train/grad_norm"] == pytest.approx(2.0)
    assert tags["perf/tokens_per_second"] == pytest.approx(200 / 2.5)
    assert tags["perf/step_seconds"] == pytest.approx(0.5)
    assert tags["perf/mfu"] == pytest.approx(80 * 1e9 / (1e12 * 4))
    assert tags["comm/bytes_total"] == 4e6 and tags["comm/other_bytes_total"] == 4e3
    # ||D||^2 is spread over the shards and the same in every replica; ||D_n - D||^2 is averaged over replicas.
    assert tags["sync/pseudo_grad_norm"] == pytest.approx(math.sqrt(4.0))
    assert tags["sync/divergence"] == pytest.approx(math.sqrt(8 / 2))
    assert "perf/mfu" not in MetricReducer(MESH, 1e9, peak=None).tags(line())
    in_turns = SimpleNamespace(**vars(MESH) | {"all_ranks": SimpleNamespace(shares_memory=True)})
    tags = MetricReducer(in_turns, flops_per_token=1e9, peak=1e12).tags(line())
    assert tags["perf/tokens_per_second"] == pytest.approx(200 / 8.5)
    assert tags["perf/step_seconds"] == pytest.approx(0.5)
    assert tags["perf/mfu"] == pytest.approx(200 / 8.5 * 1e9 / 1e12), "there is one device"
    # The shards of a replica count once.
    assert (tags["train/steps"], tags["train/gradient_steps"], tags["sync/late"]) == (11.0, 8.5, 3.0)
    assert line(7).tokens == 700


def test_gpus_that_ranks_share_count_once(monkeypatch):
    monkeypatch.setattr(metric_gather, "ranks_per_device", lambda world: 2)
    mesh = SimpleNamespace(**vars(MESH) | {"device": SimpleNamespace(type="cuda")})
    tags = MetricReducer(mesh, flops_per_token=1e9, peak=1e12).tags(line())
    assert tags["perf/mfu"] == pytest.approx(80 * 1e9 / (1e12 * 2))


def test_reserved_memory_is_that_of_the_fullest_gpu():
    reducer = MetricReducer(MESH, 1e9, None)
    assert "perf/reserved_memory_gib" not in reducer.tags(line()), "a CPU has none"
    assert "perf/virtual_seconds" not in reducer.tags(line())
    assert reducer.tags(line(virtual_seconds=[4.0, 4.0, 5.0, 4.0]))["perf/virtual_seconds"] == 5.0
    tags = reducer.tags(line(reserved_memory=[2.0**30, 3.0 * 2**30, 2.0**30, 0.0]))
    assert (tags["perf/reserved_memory_gib"], tags["perf/peak_memory_gib"]) == (3.0, 1.0)


def test_padding_is_its_share_of_all_positions():
    reducer = MetricReducer(MESH, 1e9, None)
    assert "data/padding" not in reducer.tags(line())
    tags = reducer.tags(line(padding=[0.0, 10.0, 30.0, 10.0]))
    assert tags["data/padding"] == 50 / 250 and tags["train/loss"] == reducer.tags(line())["train/loss"]


def test_an_interval_without_a_gradient_has_no_loss():
    tags = MetricReducer(MESH, 1e9, None).tags(line(loss_sum=[0.0] * 4, predicted_tokens=[0.0] * 4))
    assert math.isnan(tags["train/loss"]) and tags["perf/tokens_per_second"] == 0


def test_a_loss_that_is_not_finite_names_rank_and_replica():
    reducer = MetricReducer(MESH, 1e9, None)
    bad = line(loss_sum=[100.0, 120.0, math.nan, 160.0])
    assert reducer.tags(bad)["health/nonfinite"] == 1
    with pytest.raises(TrainingError, match=r"rank 2 \(replica 1\) at step 10"):
        reducer.check(bad)
    reducer.check(line())


def test_a_gradient_that_is_not_finite_ends_the_run_too():
    """DeepSpeed skips such a step without a message."""
    with pytest.raises(TrainingError, match=r"the norm of the gradient is inf on rank 3 \(replica 1\) at step 10"):
        MetricReducer(MESH, 1e9, None).check(line(grad_norm_sum=[1.0, 1.0, 1.0, math.inf]))


def test_a_spike_is_counted_and_does_not_move_the_mean():
    reducer = MetricReducer(MESH, 1e9, None)
    counts = []
    for step in range(40):
        factor = 5.0 if step in (25, 30) else 1.0 + 0.01 * (step % 3)
        sums = [factor * value for value in (100.0, 120.0, 140.0, 160.0)]
        counts.append(reducer.tags(line(step, loss_sum=sums))["health/loss_spikes"])
    assert (counts[24], counts[25], counts[29], counts[-1]) == (0, 1, 1, 2)


def test_a_stop_asked_of_one_rank_is_seen_in_the_line():
    assert line(stop=[0.0, 0.0, 1.0, 0.0]).any("stop")
    assert not line().any("stop")
    assert line(unwritten=[0.0, 1.0, 0.0, 0.0]).any("unwritten")
    assert not line().any("unwritten")


def test_replicas_whose_anchors_differ_are_named():
    reducer = MetricReducer(MESH, 1.0, None)
    reducer.check(line(fingerprint=[5.0, 7.0, 5.0, 7.0]))  # each of the two shards has its own
    with pytest.raises(TrainingError, match="the anchors of the 2 replicas differ, found at step 10"):
        reducer.check(line(fingerprint=[5.0, 7.0, 5.0, 8.0]))
    mesh = SimpleNamespace(**vars(MESH) | {"replicas": 4, "shard_comms": SimpleNamespace(size=1)})
    four = MetricReducer(mesh, 1.0, None)
    with pytest.raises(TrainingError, match="the anchor of replica 2 differs from the others"):
        four.check(line(fingerprint=[5.0, 5.0, 6.0, 5.0]))
