"""Tests of cursors that continue where other replicas stopped. Each entry is read once, however far each replica was."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from llmtrain.data.order import SampleCursor, merge_cursors

BATCH = 12


def read(state: dict, steps: list[int]) -> tuple[list[int], list[dict]]:
    """Continue replicas from `state`, each for its number of `steps`. Return the entries read and the final states."""
    replicas, entries, share = [SampleCursor() for _ in steps], [], BATCH // len(steps)
    for number, (replica, count) in enumerate(zip(replicas, steps, strict=True)):
        replica.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(count):
            entries += [entry for part in replica.peek(number * share, share) for entry in part]
            replica.advance(BATCH)
    return entries, [replica.state_dict() for replica in replicas]


def test_replicas_that_keep_step_leave_no_gap() -> None:
    _, states = read({"position": 24}, [3, 3, 3, 3])
    assert merge_cursors(states, BATCH) == {"position": 60}


def test_a_slow_replica_s_parts_come_first() -> None:
    entries, states = read({"position": 0}, [3, 1])
    assert entries == [*range(6), *range(12, 18), *range(24, 30), *range(6, 12)]
    assert merge_cursors(states, BATCH) == {"position": 36, "left": [[18, 24], [30, 36]]}
    entries, states = read(merge_cursors(states, BATCH), [2])
    assert entries == [*range(18, 24), *range(30, 48)]
    assert states == [{"position": 48}]


@pytest.mark.parametrize("seed", range(30))
def test_every_entry_comes_once_over_many_changes(seed: int) -> None:
    drawn, state, seen = random.Random(seed), {"position": 0}, Counter()
    for _ in range(6):
        replicas = drawn.choice([1, 2, 3, 4, 6, 12])
        entries, states = read(state, [drawn.randrange(6) for _ in range(replicas)])
        seen.update(entries)
        state = merge_cursors(states, BATCH)
    left = {entry for start, stop in state.get("left", []) for entry in range(start, stop)}
    assert set(seen.values()) <= {1} and not left & seen.keys()
    assert left | seen.keys() == set(range(state["position"]))


def test_what_is_left_counts_as_not_taken() -> None:
    unread = SampleCursor(36, [range(18, 24), range(30, 36)])
    assert (unread.num_read, unread.lowest) == (24, 18)
    assert SampleCursor(36).lowest == 36
