"""Tests of WAGMA's groups: the paper's examples, their shape, and the iterations until an update reaches all replicas."""

from __future__ import annotations

import functools
import math
import operator

import pytest

from llmtrain.config import WaitAvoidingSection
from llmtrain.errors import RecipeError
from llmtrain.sync.schedules.butterfly import groups_at

POWERS = [2**n for n in range(1, 11)]
PAIRS = [(replicas, size) for replicas in POWERS for size in POWERS if size <= replicas]


@functools.cache
def at(iteration: int, size: int, replicas: int) -> list[list[int]]:
    return groups_at(iteration, size, replicas)


def group_size(replicas: int, size: int | str) -> int:
    return WaitAvoidingSection(group_size=size).resolve_group_size(replicas)


def exchanged(iteration: int, size: int, replicas: int) -> list[list[int]]:
    """Return the groups by the text of the paper. In each of log2 S rounds, each replica meets the partner whose number differs
    in one bit, and learns what the partner knew."""
    per_step, total = int(math.log2(size)), int(math.log2(replicas))
    known = [{replica} for replica in range(replicas)]
    for turn in range(per_step):
        distance = 1 << ((iteration * per_step + turn) % total)
        known = [known[replica] | known[replica ^ distance] for replica in range(replicas)]
    return sorted(map(list, {tuple(sorted(group)) for group in known}))


def test_the_papers_example() -> None:
    """P = 8 and S = 4. The algorithm as printed and the published code both get this example wrong."""
    expected = [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1, 4, 5], [2, 3, 6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ]
    assert [at(iteration, 4, 8) for iteration in range(6)] == expected + expected


def test_the_paper_s_64_replicas() -> None:
    """With S = 8, groups are first eight neighbors, then replicas whose numbers differ by multiples of eight."""
    assert at(0, 8, 64) == [list(range(first, first + 8)) for first in range(0, 64, 8)]
    assert at(1, 8, 64) == [list(range(first, 64, 8)) for first in range(8)]


def test_groups_are_disjoint_and_cover_all() -> None:
    for replicas, size in PAIRS:
        for iteration in range(replicas.bit_length()):
            made = at(iteration, size, replicas)
            assert all(len(group) == size and group == sorted(group) for group in made)
            assert sorted(replica for group in made for replica in group) == list(range(replicas))


def test_groups_are_those_of_recursive_doubling() -> None:
    for replicas, size in [pair for pair in PAIRS if pair[0] <= 64]:
        for iteration in range(2 * replicas.bit_length()):
            assert sorted(at(iteration, size, replicas)) == exchanged(iteration, size, replicas), (replicas, size)


def test_an_update_reaches_everybody_in_log_s_of_p_iterations() -> None:
    """This holds from any iteration on, even if log2 S does not divide log2 P. One iteration less is not enough."""
    for replicas, size in PAIRS:
        needed = next(n for n in range(1, 11) if size**n >= replicas)
        for first in range(replicas.bit_length() - 1):  # the pattern repeats after log2 P iterations or sooner
            reached = [1 << replica for replica in range(replicas)]  # bit mask by replica: the updates that it has
            for iteration in range(first, first + needed):
                assert not all_reached(reached), (replicas, size, first)
                for group in at(iteration, size, replicas):
                    together = functools.reduce(operator.or_, (reached[replica] for replica in group))
                    for replica in group:
                        reached[replica] = together
            assert all_reached(reached), (replicas, size, first)


def all_reached(masks: list[int]) -> bool:
    """Return whether every replica has the update of every other."""
    return all(mask == (1 << len(masks)) - 1 for mask in masks)


def test_one_replica_is_a_group_by_itself() -> None:
    assert group_size(1, "auto") == 1
    assert at(5, 1, 1) == [[0]]


def test_auto_is_the_square_root_rounded_up_to_a_power_of_two() -> None:
    sizes = [group_size(replicas, "auto") for replicas in POWERS]
    assert sizes == [2, 2, 4, 4, 8, 8, 16, 16, 32, 32]
    for replicas, size in zip(POWERS, sizes, strict=True):
        assert size**2 >= replicas > (size // 2) ** 2


def test_a_size_that_fits_is_taken_as_given() -> None:
    assert {(replicas, size, group_size(replicas, size)) for replicas, size in PAIRS} == {(p, s, s) for p, s in PAIRS}


@pytest.mark.parametrize("size", ["auto", 2])
def test_replicas_that_are_no_power_of_two(size: int | str) -> None:
    for replicas in (3, 6, 12, 1000):
        refused = rf"power of two of replicas, and there are {replicas}; .*parallel\.replicas"
        with pytest.raises(RecipeError, match=refused):
            group_size(replicas, size)


def test_sizes_that_make_no_groups() -> None:
    for replicas, size in [(8, 1), (8, 3), (8, 6), (8, 16), (2, 4), (1, 4)]:
        with pytest.raises(RecipeError, match=rf"sync\.schedule\.group_size is {size}, .* to the {replicas} replicas"):
            group_size(replicas, size)
