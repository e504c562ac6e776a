"""What of the endless list of samples is still to be read, also when other replicas go on reading it.

Replicas that keep step leave a list without gaps. Where some have done more steps than others, the slow ones have left
their parts of some batches; whoever goes on reads these first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SampleCursor:
    """The entries that come next: those of `left`, then all from `position` on."""

    def __init__(self, position: int = 0, left: Sequence[range] = ()):
        self.position, self.left = position, list(left)

    @property
    def num_read(self) -> int:
        """How many entries have been read."""
        return self.position - sum(map(len, self.left))

    @property
    def lowest(self) -> int:
        """The first entry of the endless list that is among them."""
        return min([self.position, *(part.start for part in self.left)])

    def peek(self, first: int, count: int) -> list[range]:
        """`count` entries after the next `first` ones, in order."""
        found = []
        for upcoming in (*self.left, range(self.position, self.position + first + count)):
            here = upcoming[first : first + count]
            first, count = max(0, first - len(upcoming)), count - len(here)
            if here:
                found.append(here)
        return found

    def advance(self, count: int) -> None:
        """The next `count` entries have been read."""
        rest = []
        for part in self.left:
            used = min(count, len(part))
            count -= used
            if used < len(part):
                rest.append(part[used:])
        self.left, self.position = rest, self.position + count

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        leftover = {"left": [[part.start, part.stop] for part in self.left]} if self.left else {}
        return {"position": self.position, **leftover}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.position, self.left = state["position"], [range(*part) for part in state.get("left", [])]


def merge_cursors(states: Sequence[dict[str, Any]], global_batch: int) -> dict[str, Any]:
    """What replicas with these states, one each, have not read yet, as the state of all who go on: every entry that none
    of them has read comes once. `global_batch` is how many entries all read in a step, a replica an equal part of them."""
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
    """In ascending order, neighbors as one."""
    joined: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
