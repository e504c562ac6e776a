"""Schedules of the `sync` section, which decide how the messages of a synchronization overlap with training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from llmtrain.config.section import Count, CountOrZero, Fraction, Section
from llmtrain.errors import RecipeError

if TYPE_CHECKING:
    from llmtrain.config.sync import PeriodSection, SyncSection

PREFETCH = 2
"""Reductions in flight beyond the one being finished, when blocks synchronize one after another."""


class SyncScheduleSection(Section):
    """Base of the schedules, which decide how the messages of a synchronization overlap with training."""

    needs_anchor: ClassVar[bool] = True
    """True if this choice needs an anchor: the parameters of the last synchronization."""
    syncs_in_forward: ClassVar[bool] = False
    """True if blocks synchronize inside the forward pass, which then changes parameters."""
    syncs_all_blocks: ClassVar[bool] = False
    """True if all blocks synchronize one after another when a round has ended, before any parameter is used again. Replicas then
    also take the mean of their local steps."""
    sends_while_training: ClassVar[bool] = False
    """True if messages are in flight during local steps, on the device that computes these."""
    needs_threads: ClassVar[bool] = False
    """True if a thread of each rank exchanges messages for a replica that is late."""
    models_in_cpu_memory: ClassVar[int] = 0
    """Number of models, in master precision, that each of several replicas keeps in CPU memory for messages."""

    @property
    def blocks_in_flight(self) -> int:
        """Return the number of blocks whose reductions are in flight while all blocks synchronize one after another."""
        return PREFETCH + 1

    @property
    def mixes_parameters(self) -> bool:
        """Return whether replicas mix the anchor with their own parameters, so that they differ at the start of a round."""
        return False

    def parameters_in_flight(self, block_parameters: Sequence[int], period: PeriodSection) -> int:
        """Return the number of parameters whose mean is in flight during local steps, given the number per block."""
        return 0

    def resolve_group_size(self, replicas: int) -> int | None:
        """Return the number of replicas that average together in every step, or None if there are no groups. Raises
        RecipeError if groups can't be formed."""
        return None

    def check(self, sync: SyncSection, blocks: int | None) -> None:
        """Raise RecipeError if the schedule can't run with the other choices, or on a model of `blocks` blocks, if known."""


class BlockingSection(SyncScheduleSection):
    """Synchronization of all blocks at the end of the last step of a round."""

    kind: Literal["blocking"] = "blocking"
    """`blocking`: training waits while all blocks synchronize."""
    needs_anchor: ClassVar[bool] = False
    syncs_all_blocks: ClassVar[bool] = True


class LayerwiseSection(SyncScheduleSection):
    """Synchronization of each block just before the next forward pass gathers it (EDiT)."""

    kind: Literal["layerwise"] = "layerwise"
    """`layerwise`: blocks synchronize one by one inside the next forward pass."""
    prefetch: CountOrZero = PREFETCH
    """Number of following blocks whose reductions are in flight while one block computes."""
    needs_anchor: ClassVar[bool] = False
    syncs_in_forward: ClassVar[bool] = True
    syncs_all_blocks: ClassVar[bool] = True

    @property
    def blocks_in_flight(self) -> int:
        return self.prefetch + 1


class FragmentsSection(SyncScheduleSection):
    """Base of the schedules in which parts of the model, fragments of some blocks, synchronize in turn."""

    kind: str
    """Name of the schedule. It comes before the other keys."""
    sends_while_training: ClassVar[bool] = True
    fragments: Count = 1
    """Number of fragments. A round synchronizes each of them once, at even intervals; 1: the whole model at the round's end."""
    fragment_layout: Literal["strided", "sequential"] = "strided"
    """`strided`: block i belongs to fragment i mod fragments; `sequential`: a fragment is a run of adjacent blocks."""

    def blocks_of_fragments(self, blocks: int) -> list[list[int]]:
        """Return the blocks of each fragment, in forward order."""
        if self.fragment_layout == "strided":
            return [list(range(first, blocks, self.fragments)) for first in range(self.fragments)]
        ends = [blocks * (fragment + 1) // self.fragments for fragment in range(self.fragments)]
        return [list(range(first, end)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

    def check(self, sync: SyncSection, blocks: int | None) -> None:
        if blocks is not None and self.fragments > blocks:
            raise RecipeError(
                f"sync.schedule.fragments is {self.fragments}, but the model has {blocks} blocks (its layers, embedding and "
                f"head); give at most {blocks}"
            )


class OverlappedSection(FragmentsSection):
    """Streaming DiLoCo's schedule: fragments of the model synchronize in turn, each while training continues."""

    kind: Literal["overlapped"] = "overlapped"
    """`overlapped`: the reduction of a fragment overlaps with `steps` local steps."""
    steps: CountOrZero = 5
    """Local steps between sending a fragment and applying its mean, at most a whole round."""
    fragments: Count = 4
    """Number of fragments. A round synchronizes each of them once, at even intervals."""
    alpha: Fraction = 0.5
    """alpha: a replica continues from alpha x its own parameters + (1 - alpha) x the next anchor."""

    @property
    def mixes_parameters(self) -> bool:
        return self.alpha > 0

    def parameters_in_flight(self, block_parameters: Sequence[int], period: PeriodSection) -> int:
        """Return the parameters of the largest fragments that are in flight at once: one is sent every H / P steps."""
        fragments = self.blocks_of_fragments(len(block_parameters))
        sizes = sorted((sum(block_parameters[index] for index in fragment) for fragment in fragments), reverse=True)
        return sum(sizes[: max(1, math.ceil(self.steps * self.fragments / (period.min_length or 1)))])

    def check(self, sync: SyncSection, blocks: int | None) -> None:
        period, shortest = sync.period, sync.period.min_length
        if self.steps <= sync.reduction.steps_before_sending > 0:
            raise RecipeError(
                f"sync.schedule.steps is {self.steps}, but with sync.reduction={sync.reduction.kind} replicas agree on weights in the "
                f"first of these steps and send after it; give at least {sync.reduction.steps_before_sending + 1}"
            )
        if shortest is not None and self.steps > shortest:
            raise RecipeError(
                f"sync.schedule.steps is {self.steps}, but sync.period.{period.shortest_round} is {shortest}: a fragment's mean would "
                f"arrive after its next turn; give at most {shortest}"
            )
        if shortest is not None and self.steps == shortest and self.alpha == 0:
            raise RecipeError(
                f"sync.schedule.steps is {self.steps}, a whole round, and sync.schedule.alpha is 0: at its turn a fragment would just "
                "have dropped all steps of the round; give fewer steps or a larger alpha, or use sync.schedule=delayed"
            )
        super().check(sync, blocks)


class DelayedSection(FragmentsSection):
    """CO2's schedule: the reduction of a round overlaps with the whole next round. Every round starts from the newest anchor.
    With several fragments, each has rounds of its own, which end at even intervals."""

    kind: Literal["delayed"] = "delayed"
    """`delayed`: the mean of a round is applied one round later."""
    gap_penalty: bool = True
    """Divide a delayed mean by the staleness gap: the mean learning rate of its round, divided by that of the round that has
    just ended, at least 1."""

    def parameters_in_flight(self, block_parameters: Sequence[int], period: PeriodSection) -> int:
        return sum(block_parameters)

    def check(self, sync: SyncSection, blocks: int | None) -> None:
        period, shortest, before = sync.period, sync.period.min_length, sync.reduction.steps_before_sending
        if period.is_timed and self.fragments > 1:
            raise RecipeError(
                f"sync.schedule.fragments is {self.fragments}, but in timed rounds replicas synchronize only at a round's end; give 1"
            )
        if shortest is not None and shortest <= before > 0:
            raise RecipeError(
                f"sync.period.{period.shortest_round} is {shortest}, but with sync.reduction={sync.reduction.kind} replicas agree "
                f"on weights in the first step of a round and send after it; give at least {before + 1}"
            )
        super().check(sync, blocks)


class WaitAvoidingSection(SyncScheduleSection):
    """WAGMA's schedule: an average within a group after every step, and over all replicas after every period.

    Groups change from step to step in a butterfly pattern. No replica waits for its group: the last model of a late replica takes
    part in its place, and the late replica merges the result when it arrives itself. The number of replicas must be a power of
    two."""

    kind: Literal["wait_avoiding"] = "wait_avoiding"
    """`wait_avoiding`: a thread takes part in group averages for a replica that is late."""
    needs_threads: ClassVar[bool] = True
    models_in_cpu_memory: ClassVar[int] = 2  # the newest one, and the one whose sum over a group is in flight
    group_size: Count | Literal["auto"] = "auto"
    """Replicas per group, a power of two; `auto`: the square root of the number of replicas, rounded up to a power of two."""

    def resolve_group_size(self, replicas: int) -> int:
        if replicas & (replicas - 1):
            raise RecipeError(
                f"sync.schedule is wait_avoiding, whose groups need a power of two of replicas, and there are {replicas}; "
                f"change parallel.replicas, or use another schedule"
            )
        if self.group_size == "auto":
            return 2 ** ((replicas.bit_length()) // 2)
        if self.group_size & (self.group_size - 1) or not (2 <= self.group_size <= max(2, replicas)):
            raise RecipeError(
                f"sync.schedule.group_size is {self.group_size}, expected a power of two from 2 to the {replicas} replicas; change it, or "
                f"use auto"
            )
        return min(self.group_size, replicas)
