"""Check for state that is equal on every replica and so carries over to any number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def require_equal(states: Sequence[T]) -> T:
    """Return the value all replicas share; assert that they do. State that differs needs its own resharding rule."""
    assert all(state == states[0] for state in states), f"replicas differ in what they should share: {states}"
    return states[0]
