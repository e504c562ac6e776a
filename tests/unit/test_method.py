"""Test of a method that rolls back to its anchor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmtrain.config import BlockingSection
from llmtrain.sync.method import Method


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_roll_back_leaves_a_synchronous_phase_alone(is_synchronous: bool):
    returned = []
    block_sync = SimpleNamespace(reset_to_anchor=lambda: returned.append("to the anchor"), ensure_anchor=lambda: None)
    schedule = SimpleNamespace(
        section=BlockingSection(), block_sync=block_sync, begin_step=lambda: None, forget_tokens=lambda: None
    )
    period = SimpleNamespace(is_synchronous=lambda step: is_synchronous, begin_local_step=lambda step: None)
    method = Method(SimpleNamespace(register_block_hook=lambda hook: None), period, schedule, None)
    method.begin_step(1, 0.1)
    method.roll_back()
    assert bool(returned) != is_synchronous
