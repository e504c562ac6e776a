"""WAGMA's groups of S among P replicas, which average together and change like a butterfly's wires (arXiv 2005.00124).

The formula is from the paper's text, because the printed algorithm and the published code skip bits.
"""

from __future__ import annotations

from llmtrain.errors import RecipeError


def group_size(replicas: int, size: int | str) -> int:
    """Return S: `size`, or for "auto" the square root of `replicas` rounded up to a power of two. At most `replicas`.

    Raises RecipeError if `replicas` cannot be divided into groups of that size.
    """
    if replicas & (replicas - 1):
        raise RecipeError(
            f"sync.group is a butterfly, which needs a power of two of replicas, and there are {replicas}; "
            f"change parallel.replicas, or use sync.group=all"
        )
    if size == "auto":
        return 2 ** ((replicas.bit_length()) // 2)
    if size & (size - 1) or not (2 <= size <= max(2, replicas)):
        raise RecipeError(
            f"sync.group.size is {size}, expected a power of two from 2 to the {replicas} replicas; change it, or use auto"
        )
    return min(size, replicas)


def varying_bits(iteration: int, size: int, replicas: int) -> tuple[int, ...]:
    """Return the bits of a replica's number in which a group's members differ in this iteration (from 0), ascending:
    (iteration x log2 S + r) mod log2 P for r < log2 S."""
    per_step, total = size.bit_length() - 1, replicas.bit_length() - 1
    return tuple(sorted({(iteration * per_step + r) % total for r in range(per_step)})) if total else ()


def partition(of_bits: tuple[int, ...], replicas: int) -> list[list[int]]:
    """Return all groups whose members differ in these bits only, each in ascending order."""
    mask = sum(1 << bit for bit in of_bits)
    leaders = [replica for replica in range(replicas) if replica & mask == 0]
    within = [number for number in range(replicas) if number & ~mask == 0]
    return [[leader | number for number in within] for leader in leaders]
