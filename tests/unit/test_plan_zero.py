"""Memory that the plan estimates under ZeRO, compared with counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmtrain.parallel.zero_layout import BUCKET
from llmtrain.plan.memory import estimate
from llmtrain.plan.model_size import size_of
from tests.unit.test_plan_memory import FORWARD, LAYERS, OF_LAYER, SHARDED, make, planned


def test_zero_stage_3_has_room_for_gradients_at_all_times(tmp_path) -> None:
    keys = ["train.global_batch=2", "parallel.engine=zero"]
    three, two = (planned(tmp_path, *keys, f"parallel.zero_stage={stage}") for stage in (3, 2))
    bucket = 50_000_000
    forward = 4 * 3864 + LAYERS * OF_LAYER + FORWARD + 4 * bucket + three.loss
    assert three.device_total == pytest.approx(three.weights + three.optimizer + three.anchors + forward, abs=LAYERS)
    # After backward: the copies of a bucket take more memory than activations did.
    backward = 4 * 3864 + (2 + 4) * 3864 + 2 * 2 * bucket
    assert two.device_total == two.weights + two.optimizer + two.anchors + backward


@pytest.mark.parametrize(
    ("stage", "weights", "gradients"), [(1, 4 / 4 + 2, 4 / 4), (2, 4 / 4 + 2, 4 / 4), (3, 6 / 4, 4 / 4)]
)
def test_zero_shards_by_its_stage(tmp_path, stage: int, weights: float, gradients: float) -> None:
    keys = ["parallel.engine=zero", f"parallel.zero_stage={stage}"]
    memory = planned(tmp_path, *keys, shard=4)
    p = size_of(make(tmp_path)).parameters
    found = (memory.weights, memory.gradients, memory.optimizer, memory.host)
    assert found == pytest.approx((weights * p, gradients * p, 8 * p / 4, 0), abs=16)
    away = planned(tmp_path, *keys, "parallel.zero_offload=true", shard=4)
    found = (away.weights, away.gradients, away.optimizer, away.host)
    on_device, more = (0, 4) if stage == 3 else (gradients * p, 2)
    assert found == pytest.approx((weights * p - p, on_device, 0, (4 + 4 + 8 + more) * p / 4), abs=16)


def test_zero_1_keeps_all_gradients_while_it_accumulates(tmp_path) -> None:
    keys = ["parallel.engine=zero", "parallel.zero_stage=1"]
    once, twice = (planned(tmp_path, *keys, f"train.global_batch={batch}", shard=4) for batch in (8, 16))
    assert twice.gradients - once.gradients == 2 * size_of(make(tmp_path)).parameters


@pytest.mark.parametrize(
    ("stage", "precision", "after_backward"),
    [
        (1, "fp32", 2 * 4 * BUCKET + 4 * 3864),  # two buckets, and a copy of the gradients in the last one
        (1, "bf16", 2 * 2 * BUCKET + (2 + 4) * 3864),
        (2, "fp32", 2 * 4 * BUCKET + 4 * 3864),
        (2, "bf16", 2 * 2 * BUCKET + (2 + 4) * 3864 + SHARDED / 2),  # in addition, this rank's gradients
        (3, "bf16", 4 * BUCKET + 4 * 3864 + SHARDED / 2),
    ],
)
def test_zero_reduces_copies_after_backward(tmp_path, stage: int, precision: str, after_backward: int) -> None:
    """All layers are recomputed and the loss is small, so the peak is after backward."""
    keys = ["parallel.engine=zero", f"parallel.zero_stage={stage}", f"parallel.precision={precision}"]
    few = [
        "parallel.activation_checkpointing=true",
        "parallel.loss_chunk=1",
        "train.micro_batch=1",
        "train.global_batch=4",
    ]
    memory = planned(tmp_path, *keys, *few, "train.sequence_length=1", shard=4)
    peak = memory.device_total - memory.weights - memory.optimizer - memory.anchors
    assert peak == after_backward


def test_zero_2_keeps_gradients_of_earlier_micro_batches(tmp_path) -> None:
    keys = ["parallel.engine=zero", "parallel.zero_stage=2", "parallel.precision=fp32", "train.sequence_length=1"]
    few = ["parallel.activation_checkpointing=true", "parallel.loss_chunk=1", "train.micro_batch=1"]
    once, twice = (planned(tmp_path, *keys, *few, f"train.global_batch={n}", shard=4) for n in (4, 8))
    assert twice.device_total - once.device_total == SHARDED / 2


def test_zero_copies_a_bucket_during_backward_if_there_are_several(tmp_path) -> None:
    """Activations and copies are then in memory at the same time."""
    size = replace(size_of(make(tmp_path)), parameters=BUCKET + 1)
    for stage, copies in ((1, 2 + 4), (3, 4)):
        many_tokens = ["parallel.loss_chunk=1", "train.micro_batch=131072", "train.global_batch=524288"]
        recipe = make(tmp_path, "parallel.engine=zero", f"parallel.zero_stage={stage}", *many_tokens)
        several, single = (estimate(recipe, one, 1, 4) for one in (size, replace(size, parameters=BUCKET)))
        assert several.device_total - single.device_total == pytest.approx(copies * BUCKET, abs=100), stage


def test_zero_3_gathers_ahead_if_there_are_several_ranks(tmp_path) -> None:
    keys = ["parallel.engine=zero", "parallel.zero_stage=3"]
    alone, two = (planned(tmp_path, *keys, shard=shard) for shard in (1, 2))
    assert two.gathered - alone.gathered == 2 * (3864 - 808 - 800), "all blocks instead of the two largest"
    in_forward = planned(tmp_path, *keys, "sync.schedule=layerwise", shard=2)
    assert in_forward.gathered == alone.gathered, "blocks that synchronize in forward are not gathered ahead"
