"""Position in the endless list of samples, which stays exact when the set of replicas changes.

Replicas that have taken equally many steps leave no gaps in the list. If some have taken more steps than others,
the slower ones leave their parts of some batches unread. The replicas of the continued run read these parts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SampleCursor:
    """Cursor over the endless list of samples. The next entries are those of `left`, then all from `position` on."""

    def __init__(self, position: int = 0, left: Sequence[range] = ()):
        self.position, self.left = position, list(left)

    @property
    def num_read(self) -> int:
        """Return the number of entries read so far."""
        return self.position - sum(map(len, self.left))

    @property
    def lowest(self) -> int:
        """Return the lowest unread entry."""
        return min([self.position, *(part.start for part in self.left)])

    def peek(self, first: int, count: int) -> list[range]:
        """Return the `count` unread entries that follow the next `first` ones, in order, as ranges."""
        found = []
        for upcoming in (*self.left, range(self.position, self.position + first + count)):
            here = upcoming[first : first + count]
            first, count = max(0, first - len(upcoming)), count - len(here)
            if here:
                found.append(here)
        return found

    def advance(self, count: int) -> None:
        """Mark the next `count` entries as read."""
        rest = []
        for part in self.left:
            used = min(count, len(part))
            count -= used
            if used < len(part):
                rest.append(part[used:])
        self.left, self.position = rest, self.position + count

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values."""
        leftover = {"left": [[part.start, part.stop] for part in self.left]} if self.left else {}
        return {"position": self.position, **leftover}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.left = state["position"], [range(*part) for part in state.get("left", [])]


def merge_cursors(states: Sequence[dict[str, Any]], global_batch: int) -> dict[str, Any]:
    """Return the state from which every replica of a continued run starts, given the state of each earlier replica.
    Each entry that no replica has read occurs in it exactly once. `global_batch` is the number of entries that all
    replicas read per step, in equal parts."""
    replicas = [SampleCursor() for _ in states]
    for replica, state in zip(replicas, states, strict=True):
        replica.load_state_dict(state)
    ahead, share = max(replica.num_read for replica in replicas), global_batch // len(replicas)
    left = []
    for number, replica in enumerate(replicas):
        while replica.num_read < ahead:
            left += replica.peek(number * share, share)
            replica.advance(global_batch)
    first = replicas[0]
    return SampleCursor(first.position, _joined([*left, *first.left])).state_dict()


def _joined(parts: list[range]) -> list[range]:
    """Return the ranges in ascending order, with adjacent ones merged."""
    joined: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
