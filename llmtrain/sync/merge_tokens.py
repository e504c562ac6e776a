"""Token counts of a schedule's state on another number of shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def merge_tokens(states: Sequence[Any], shards: int) -> Any:
    """Return one state for the ranks of a replica on another number of `shards`, given the states of its old ranks.

    The states are nested dicts and lists that are equal except for the numbers named `tokens`. Each of these is replaced by
    an equal part of the old ranks' sum.
    """
    first, *_ = states
    if isinstance(first, dict):
        parts = {name: [state[name] for state in states] for name in first}
        return {name: sum(of) / shards if name == "tokens" else merge_tokens(of, shards) for name, of in parts.items()}
    if isinstance(first, list):
        return [merge_tokens(of_all, shards) for of_all in zip(*states, strict=True)]
    return first
