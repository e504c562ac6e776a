"""Who averages with whom in WAGMA (arXiv 2005.00124): groups of S among P replicas that change like a butterfly's wires.

The formula is the text's; the printed algorithm and the published code leave bits out.
"""

from __future__ import annotations

from llmtrain.errors import RecipeError


def group_size(replicas: int, size: int | str) -> int:
    """S: as given, or for "auto" the square root of `replicas`, rounded up to a power of two.

    Raises RecipeError if groups of that size can't be made of so many replicas.
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
    """The bits of a replica's number in which the members of a group differ in this iteration (from 0), ascending:
    (iteration x log2 S + r) mod log2 P for r < log2 S."""
    per_step, total = size.bit_length() - 1, replicas.bit_length() - 1
    return tuple(sorted({(iteration * per_step + r) % total for r in range(per_step)})) if total else ()


def partition(of_bits: tuple[int, ...], replicas: int) -> list[list[int]]:
    """All groups whose members differ in just these bits, each in ascending order."""
    mask = sum(1 << bit for bit in of_bits)
    leaders = [replica for replica in range(replicas) if replica & mask == 0]
    within = [number for number in range(replicas) if number & ~mask == 0]
    return [[leader | number for number in within] for leader in leaders]
