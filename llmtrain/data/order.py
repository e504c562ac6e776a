"""Order in which a run reads samples, and the cursor of what each replica has read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

FIRST_BLOCK, LARGEST_BLOCK = 2_000_000, 64_000_000
"""Tokens of a stream's first block, for which a run waits before its first step, and of its largest blocks."""


def block_of(token: int) -> tuple[int, int]:
    """Return the bounds [start, end) of the block of tokens that contains `token`. Each block is twice as large as the one
    before it, up to LARGEST_BLOCK."""
    start, size = 0, FIRST_BLOCK
    while size < LARGEST_BLOCK and token >= start + size:
        start, size = start + size, min(2 * size, LARGEST_BLOCK)
    start += (token - start) // size * size
    return start, start + size


def block_of_sample(sample: int, sequence_length: int) -> tuple[int, int]:
    """Return the bounds [start, end) of the block of samples that contains `sample`. A sample belongs to the block that
    contains its last input."""
    start, end = block_of((sample + 1) * sequence_length - 1)
    return start // sequence_length, end // sequence_length


class SampleOrder:
    """Endless list of samples: the permutations of all epochs, one after the other.

    It depends on the seed and the number of samples alone, so it is the same on every rank and for every mesh. If the data
    has grown since the run began (`resize`), the first epoch is a permutation of the samples that existed then, followed by
    one of those added.

    With blocks, the first epoch is a permutation of the samples of the first block, followed by one of those of the second,
    and so on. Blocks also end where the data ended before it grew. The order then does not depend on how many samples exist
    when an entry is looked up, because the lookup waits until the entry's block is complete. Later epochs have no blocks.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        sizes: Sequence[int] = (),
        *,
        block: Callable[[int], tuple[int, int]] | None = None,
        wait: Callable[[int], int] | None = None,
    ) -> None:
        """Order `num_samples` samples. `block` returns the bounds [start, end) of a sample's block. `wait(n)` waits until n
        samples exist or the source has ended, and returns how many exist. If the source ends with fewer than `num_samples`,
        an epoch has only those."""
        self.num_samples = num_samples
        self.sizes = [*sizes] or [num_samples]
        """Number of samples when the run began, followed by the number after each growth of the data."""
        self._seed, self._block, self._wait = seed, block, wait
        self._parts: dict[tuple[int, int], np.ndarray] = {}
        """Permutations, by epoch and first sample of the range that they permute."""

    def sample(self, entry: int) -> int:
        """Return the sample at an entry of the list."""
        epoch, first = self._part_at(entry)
        return int(self._parts[epoch, first][entry - epoch * self.num_samples - first])

    def state_dict(self) -> dict[str, Any]:
        """Return the state that makes another order equal to this one, given the same seed and number of samples."""
        return {"sizes": self.sizes} if len(self.sizes) > 1 else {}

    def forget(self, before: int) -> None:
        """Free the memory of permutations whose entries are all before the given one."""
        self._parts = {
            (epoch, first): part
            for (epoch, first), part in self._parts.items()
            if epoch * self.num_samples + first + len(part) > before
        }

    def wait_for(self, entry: int) -> None:
        """Wait until the sample at an entry exists."""
        self._part_at(entry)

    def _part_at(self, entry: int) -> tuple[int, int]:
        """Wait until all samples among which an entry is shuffled exist, and store their permutation in `_parts`.
        Return the key of the permutation: the entry's epoch and the first of these samples."""
        epoch, index = divmod(entry, self.num_samples)
        first, end = self._bounds(epoch, index)
        if (epoch, first) not in self._parts:
            # a later epoch shuffles all samples of the first one, so all of them must exist
            least = end if epoch == 0 else self.num_samples
            if self._wait is not None and (existing := self._wait(least)) < least:
                self.num_samples = existing  # the source has ended
                return self._part_at(entry)
            dtype = np.uint32 if end <= 1 << 32 else np.uint64
            generator = np.random.default_rng([self._seed, epoch, *([first] if first else [])])
            self._parts[epoch, first] = generator.permutation(np.arange(first, end, dtype=dtype))
        return epoch, first

    def _bounds(self, epoch: int, index: int) -> tuple[int, int]:
        """Return the bounds [first, end) of the samples among which entry `index` of an epoch is shuffled."""
        if epoch:
            return 0, self.num_samples
        ends = [*self.sizes, self.num_samples]
        first, end = (0, self.num_samples) if self._block is None else self._block(index)
        first = max([first, *(size for size in ends if size <= index)])
        return first, min([end, *(size for size in ends if size > index)])


class SampleCursor:
    """Cursor over the endless list of samples. The unread entries are those in the ranges `left`, and then all entries from
    `position` on."""

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
        """Return the `count` unread entries after the next `first` ones, as ranges in order. They stay unread."""
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
        self.left = rest
        self.position += count

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serializable values."""
        leftover = {"left": [[part.start, part.stop] for part in self.left]} if self.left else {}
        return {"position": self.position, **leftover}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.left = [range(*part) for part in state.get("left", [])]


def merge_cursors(states: Sequence[dict[str, Any]], global_batch: int) -> dict[str, Any]:
    """Return the state from which every replica of a continued run starts, given the state of each earlier replica. Each entry
    that no replica has read occurs exactly once in it. `global_batch` is the number of entries that all replicas together read
    per step, in equal parts. If the parts were not equal, each state has a `part`: [start, stop, global batch]."""
    replicas = [SampleCursor() for _ in states]
    for replica, state in zip(replicas, states, strict=True):
        replica.load_state_dict(state)
    ahead = max(replica.num_read for replica in replicas)
    equal = global_batch // len(replicas)
    left = []
    for number, (replica, state) in enumerate(zip(replicas, states, strict=True)):
        start, stop, batch = state.get("part", (number * equal, (number + 1) * equal, global_batch))
        while replica.num_read < ahead:
            left += replica.peek(start, stop - start)
            replica.advance(batch)
    sizes = {"sizes": states[0]["sizes"]} if "sizes" in states[0] else {}
    # All replicas have now read equally many entries, so all cursors are equal.
    return SampleCursor(replicas[0].position, _joined([*left, *replicas[0].left])).state_dict() | sizes


def resize(state: dict[str, Any], before: int, now: int) -> dict[str, Any]:
    """Return a loader's state for data that now has `now` samples. The earlier numbers of samples are the state's
    `sizes` or, if it has none, `before`. In the first epoch, new samples come after the old ones. If there are fewer
    samples now, the order stays the same only up to the last of `sizes` below `now`."""
    sizes = state.get("sizes", [before])
    sizes = [*(size for size in sizes if size < now), now]
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
