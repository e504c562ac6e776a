"""Tests of DeepSpeed's flat tensors, from parameters to the parts of ranks and back, of their padding, and of DeepSpeed's options."""

from __future__ import annotations

import math

import pytest
import torch

from llmtrain.config import ParallelSection
from llmtrain.parallel.zero_layout import FlatGroup, deepspeed_config

SHAPES = {"a": torch.Size([3]), "b": torch.Size([2, 4]), "c": torch.Size([1]), "d": torch.Size([5, 1])}
TOTAL = sum(map(math.prod, SHAPES.values()))


def group_of(ranks: int, by_parameter: bool) -> FlatGroup:
    widths = [math.ceil(math.prod(shape) / ranks) for shape in SHAPES.values()]
    size = sum(widths) if by_parameter else math.ceil(TOTAL / ranks) + 1
    return FlatGroup(list(SHAPES), list(SHAPES.values()), ranks, size, by_parameter)


def numbered() -> dict[str, torch.Tensor]:
    """Return parameters whose values are all different and not zero."""
    values = torch.arange(1.0, TOTAL + 1).split([math.prod(shape) for shape in SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), values, strict=True)}


@pytest.mark.parametrize("by_parameter", [True, False])
def test_parts_make_the_whole_again(by_parameter: bool) -> None:
    for ranks in range(1, 9):
        group, whole = group_of(ranks, by_parameter), numbered()
        found = group.full_tensors(torch.stack([group.part(whole, rank) for rank in range(ranks)]))
        assert all(torch.equal(found[name], whole[name]) for name in SHAPES), ranks


@pytest.mark.parametrize("by_parameter", [True, False])
def test_padding_is_all_that_no_parameter_fills(by_parameter: bool) -> None:
    for ranks in range(1, 9):
        group = group_of(ranks, by_parameter)
        for rank in range(ranks):
            part = group.part(numbered(), rank)
            is_padding = torch.zeros(group.size, dtype=torch.bool)
            for place in group.padding(rank):
                is_padding[place] = True
            assert torch.equal(is_padding, part == 0), (ranks, rank)


def test_parts_by_hand() -> None:
    by_parameter, end_to_end = group_of(2, True), group_of(2, False)
    assert by_parameter.part(numbered(), 0).tolist() == [1, 2, 4, 5, 6, 7, 12, 13, 14, 15]
    assert by_parameter.part(numbered(), 1).tolist() == [3, 0, 8, 9, 10, 11, 0, 16, 17, 0]
    assert end_to_end.part(numbered(), 1).tolist() == [*range(11, 18), 0, 0, 0]


@pytest.mark.parametrize(
    ("stage", "sends", "offload", "overlaps", "norm"),
    [
        (1, False, False, True, False),
        (2, False, False, True, False),
        (2, True, False, False, False),
        (2, True, True, False, None),
        (3, True, False, True, None),
    ],
)
def test_deepspeed_waits_neither_for_messages_nor_for_norms(
    stage: int, sends: bool, offload: bool, overlaps: bool, norm: bool | None
) -> None:
    parallel = ParallelSection(engine="zero", zero_stage=stage, zero_offload=offload, precision="bf16")
    config = deepspeed_config(parallel, changes_in_forward=False, sends_while_training=sends)
    zero = config["zero_optimization"]
    assert (zero["overlap_comm"], zero.get("compute_grad_norm")) == (overlaps, norm)
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}
