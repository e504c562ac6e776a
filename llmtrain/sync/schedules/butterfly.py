"""WAGMA's groups of S of the P replicas, whose members change in a butterfly pattern (arXiv 2005.00124).

The formula is from the paper's text, because the printed algorithm and the published code skip bits.
"""

from __future__ import annotations


def groups_at(iteration: int, size: int, replicas: int) -> list[list[int]]:
    """Return the groups of `size` replicas that average in this iteration (from 0), each in ascending order. `size` and
    `replicas` are powers of 2.

    The groups repeat after at most log2 P iterations. Another pattern of groups (pairs, a ring) needs another function of this kind.
    """
    return partition(varying_bits(iteration, size, replicas), replicas)


def varying_bits(iteration: int, size: int, replicas: int) -> tuple[int, ...]:
    """Return the bits of a replica's number in which a group's members differ in this iteration (from 0), ascending:
    (iteration x log2 S + r) mod log2 P for r < log2 S."""
    per_step, total = size.bit_length() - 1, replicas.bit_length() - 1
    return tuple(sorted({(iteration * per_step + r) % total for r in range(per_step)})) if total else ()


def partition(of_bits: tuple[int, ...], replicas: int) -> list[list[int]]:
    """Return the groups of replicas whose numbers differ in these bits only, each in ascending order."""
    mask = sum(1 << bit for bit in of_bits)
    leaders = [replica for replica in range(replicas) if replica & mask == 0]
    within = [number for number in range(replicas) if number & ~mask == 0]
    return [[leader | number for number in within] for leader in leaders]
