"""State of which every replica holds the same, whatever their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def require_equal(states: Sequence[T]) -> T:
    """What all replicas say. State that differs between them needs a rule of its own before other replicas can go on."""
    assert all(state == states[0] for state in states), f"replicas differ in what they should share: {states}"
    return states[0]
