"""Order of the samples that a run reads, and what each replica has read of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


class SampleOrder:
    """Endless list of samples: the permutations of all epochs, one after the other.

    It depends on the seed and the number of samples alone, so it is the same on every rank and for every mesh. If the data
    has grown since the run began (`grow`), the first epoch is a permutation of the samples that existed then, followed by
    one of those added.
    """

    def __init__(self, num_samples: int, seed: int, sizes: Sequence[int] = ()) -> None:
        self.num_samples = num_samples
        self.sizes = [*sizes] or [num_samples]
        """Numbers of samples that the data has had since the run began."""
        self._seed = seed
        self._epochs: dict[int, np.ndarray] = {}

    def sample(self, entry: int) -> int:
        """Return the sample at an entry of the list."""
        epoch, index = divmod(entry, self.num_samples)
        if epoch not in self._epochs:
            dtype = np.uint32 if self.num_samples <= 1 << 32 else np.uint64
            sizes = self.sizes if epoch == 0 else self.sizes[-1:]
            parts = [
                np.random.default_rng([self._seed, epoch, *([first] if first else [])]).permutation(
                    np.arange(first, end, dtype=dtype)
                )
                for first, end in pairwise([0, *sizes])
            ]
            self._epochs[epoch] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return int(self._epochs[epoch][index])

    def state_dict(self) -> dict[str, Any]:
        """Return what another order needs to be the same, beside the number of samples."""
        return {"sizes": self.sizes} if len(self.sizes) > 1 else {}

    def forget(self, before: int) -> None:
        """Free the memory of epochs whose entries are all before the given one."""
        oldest = before // self.num_samples
        self._epochs = {epoch: order for epoch, order in self._epochs.items() if epoch >= oldest}


class SampleCursor:
    """Cursor over the endless list of samples. The unread entries are those of `left`, then all from `position` on."""

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
        """Return the `count` unread entries after the next `first` ones as ranges, in order."""
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
    Each entry that no replica has read occurs exactly once in it. `global_batch` is the number of entries that all
    replicas together read per step, in equal parts."""
    replicas = [SampleCursor() for _ in states]
    for replica, state in zip(replicas, states, strict=True):
        replica.load_state_dict(state)
    ahead, share = max(replica.num_read for replica in replicas), global_batch // len(replicas)
    left = []
    for number, replica in enumerate(replicas):
        while replica.num_read < ahead:
            left += replica.peek(number * share, share)
            replica.advance(global_batch)
    first, sizes = replicas[0], {"sizes": states[0]["sizes"]} if "sizes" in states[0] else {}
    return SampleCursor(first.position, _joined([*left, *first.left])).state_dict() | sizes


def grow(state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """Return a loader's state for data that had `before` samples, or its state's `sizes`, and has `now` samples. The new
    ones come after the old ones of the first epoch. If there are fewer now, the order is that of a run that begins."""
    sizes = state.get("sizes", [before])
    sizes = [*sizes, now] if now > sizes[-1] else [now] if now < sizes[-1] else sizes
    rest = {key: value for key, value in state.items() if key != "sizes"}
    return rest if len(sizes) == 1 else rest | {"sizes": sizes}


def _joined(parts: list[range]) -> list[range]:
    """Return the ranges in ascending order, with adjacent ones merged."""
    joined: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
