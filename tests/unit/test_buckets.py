"""Test of the division of gradients into messages of limited size and one dtype."""

from __future__ import annotations

import pytest
import torch

from llmtrain.sync.own_loop import gradients


def test_messages_are_of_one_dtype_and_no_larger_than_one_gradient_or_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 40)
    single, half = torch.float32, torch.bfloat16
    sizes = [(4, single), (6, single), (1, single), (20, single), (2, single), (3, half), (17, half), (1, half)]
    made = [torch.empty(size, dtype=dtype) for size, dtype in sizes]
    found = list(gradients.buckets(made))
    assert [[gradient.numel() for gradient in bucket] for bucket in found] == [[4, 6], [1], [20], [2], [3, 17], [1]]
    assert [id(one) for bucket in found for one in bucket] == list(map(id, made))
    assert list(gradients.buckets([])) == []
