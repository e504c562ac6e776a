"""The `sync` section: the independent choices that a method of synchronization is made of.

when (`period`) x what (`reduction`) x how applied (`outer`) x how run (`schedule`) x `pull` x `wire`.

Each kind of a choice is a class here, which knows its consequences: what must be kept and checked, what is in flight. Its
implementation is in `llmtrain/sync`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from llmtrain.config.section import DecayRate, Fraction, Section, kind
from llmtrain.errors import RecipeError

Normalize = Literal["none", "lr", "lr_sum"]
PREFETCH = 2
"""Reductions in flight beyond the one being finished, when blocks synchronize one after another."""


class PeriodSection(Section):
    """When replicas synchronize."""

    averages_gradients: ClassVar[bool] = False
    """Whether every step is synchronous: there are no local steps and no rounds."""
    is_timed: ClassVar[bool] = False
    """Whether rounds are spans of time, in which replicas do different numbers of steps."""
    follows_lr: ClassVar[bool] = False
    """Whether the length of a round depends on the learning rate."""
    shortest_round: ClassVar[str | None] = None
    """Key of the fewest local steps in a round; None if no key says it."""


class EveryStepsSection(PeriodSection):
    """A round is `every` local steps."""

    kind: Literal["steps"] = "steps"
    """`steps`: a round is a fixed number of local steps."""
    every: PositiveInt = 128
    """Local steps H in a round."""
    shortest_round: ClassVar[str | None] = "every"


class QsrSection(PeriodSection):
    """QSR: rounds of max(base, floor((alpha / lr)^2)) local steps, longer as the learning rate falls."""

    kind: Literal["qsr"] = "qsr"
    """`qsr`: the length follows from the learning rate at the round's start."""
    base: PositiveInt = 4
    """Local steps at least; those of every round until the learning rate has fallen below alpha / sqrt(base)."""
    alpha: PositiveFloat
    """Growth, in units of the learning rate: with `optim.lr` x sqrt(base), rounds grow from the peak on."""
    shortest_round: ClassVar[str | None] = "base"
    follows_lr: ClassVar[bool] = True


class EverySecondsSection(PeriodSection):
    """A-EDiT: each replica trains until its time is up, so fast ones do more local steps than slow ones."""

    kind: Literal["seconds"] = "seconds"
    """`seconds`: a round is a span of time; replicas do different numbers of local steps in it."""
    every: PositiveFloat = 600
    """Seconds from one meeting of the replicas to the next; the last one is shortened to end the run on its tokens."""
    min_steps: NonNegativeInt = 100
    """Local steps of all replicas together that a round needs; with fewer, the meeting passes without a synchronization."""
    is_timed: ClassVar[bool] = True


class EveryStepSection(PeriodSection):
    """Gradients are averaged over the replicas in every step: synchronous data parallelism."""

    kind: Literal["every_step"] = "every_step"
    """`every_step`: no local steps at all."""
    averages_gradients: ClassVar[bool] = True


class OuterSection(Section):
    """How the reduced pseudo-gradient is applied to the anchor."""

    needs_anchor: ClassVar[bool] = True
    """Whether replicas keep the parameters of the last synchronization."""
    has_momentum: ClassVar[bool] = False
    """Whether a momentum of the size of the parameters is kept."""


class AverageSection(OuterSection):
    """The next anchor is the replicas' mean."""

    kind: Literal["average"] = "average"
    """`average`: anchor <- anchor - D, the reduced pseudo-gradient."""
    needs_anchor: ClassVar[bool] = False


class SgdSection(OuterSection):
    """SGD on the pseudo-gradient."""

    kind: Literal["sgd"] = "sgd"
    """`sgd`: anchor <- anchor - lr x D."""
    lr: PositiveFloat = 1.0
    """Outer learning rate."""


class NesterovSection(OuterSection):
    """SGD with Nesterov momentum on the pseudo-gradient."""

    kind: Literal["nesterov"] = "nesterov"
    """`nesterov`: b <- momentum x b + D; anchor <- anchor - lr x (D + momentum x b)."""
    lr: PositiveFloat = 0.7
    """Outer learning rate."""
    momentum: DecayRate = 0.9
    """Outer momentum."""
    normalize: Normalize = "none"
    """Keep b in units of the inner learning rate, so that it fits rounds of any length: D and b are divided by the
    round's last learning rate (`lr`) or the sum of its learning rates (`lr_sum`), the step multiplied by it."""
    has_momentum: ClassVar[bool] = True


class MomentumSection(OuterSection):
    """SGD with heavy-ball momentum on the pseudo-gradient (SlowMo, CO2)."""

    kind: Literal["momentum"] = "momentum"
    """`momentum`: b <- momentum x b + D; anchor <- anchor - lr x b."""
    lr: PositiveFloat = 1.0
    """Outer (slow) learning rate."""
    momentum: DecayRate = 0.5
    """Outer (slow) momentum."""
    clip: PositiveFloat | None = None
    """CO2's momentum clipping: every element of b is kept within [-clip, clip]; `null`: off."""
    normalize: Normalize = "none"
    """As for `nesterov`; SlowMo is `lr`."""
    has_momentum: ClassVar[bool] = True


class ReductionSection(Section):
    """How the replicas' pseudo-gradients become one."""

    needs_anchor: ClassVar[bool] = False
    """Whether replicas keep the parameters of the last synchronization."""


class MeanSection(ReductionSection):
    """All replicas count alike."""

    kind: Literal["mean"] = "mean"
    """`mean`: the plain mean."""


class EditPenaltySection(ReductionSection):
    """EDiT's pseudo-gradient penalty; each part can be switched off with `null`."""

    kind: Literal["edit_penalty"] = "edit_penalty"
    """`edit_penalty`: a weighted mean, without anomalous replicas, and clipped."""
    z: PositiveFloat | None = 3.0
    """Anomaly elimination: a norm more than z deviations above its running mean is left out; `null`: off."""
    ema: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Weight of the newest norm in the running mean and variance (which are bias-corrected)."""
    min_rounds: Annotated[int, Field(ge=2)] = 10
    """Rounds of a replica's block before the test may flag it. A non-finite norm is always flagged."""
    temperature: PositiveFloat | None = 1.0
    """Weighted averaging: weights softmax(-norm / temperature); `null`: equal weights."""
    clip: PositiveFloat | None = 10.0
    """Clipping: largest norm of a block's averaged pseudo-gradient; `null`: off."""
    step_weight: Fraction = 0.0
    """r: weights are (1 - r) x the above + r x a replica's share of the round's local steps, for rounds of seconds."""
    needs_anchor: ClassVar[bool] = True


class SyncScheduleSection(Section):
    """How a synchronization runs."""

    needs_anchor: ClassVar[bool] = True
    """Whether replicas keep the parameters of the last synchronization."""
    syncs_in_forward: ClassVar[bool] = False
    """Whether blocks synchronize inside the forward pass, so that it changes parameters."""

    @property
    def blocks_in_flight(self) -> int:
        """Return the number of blocks whose reductions are in flight while all blocks synchronize one after another."""
        return PREFETCH + 1

    def hidden_steps(self, round_length: float) -> float:
        """Return the number of local steps that run while a round's messages are in flight."""
        return 0.0

    def parameters_in_flight(self, block_parameters: Sequence[int]) -> int:
        """Return the number of parameters whose mean is in flight during local steps, given that of each block."""
        return 0

    def resolve_group_size(self, replicas: int) -> int | None:
        """Return the number of replicas that average together in every step; None if there are no groups. Raises
        RecipeError if groups can't be formed."""
        return None

    def check(self, period: PeriodSection, blocks: int | None) -> None:
        """Raise RecipeError if the schedule can't run with this period, or on a model of so many blocks, if known."""


class BlockingSection(SyncScheduleSection):
    """Synchronize all blocks at the end of the round's last step."""

    kind: Literal["blocking"] = "blocking"
    """`blocking`: training waits while all blocks synchronize."""
    needs_anchor: ClassVar[bool] = False


class LayerwiseSection(SyncScheduleSection):
    """Synchronize each block just before the next forward pass gathers it."""

    kind: Literal["layerwise"] = "layerwise"
    """`layerwise`: block by block inside the next forward pass."""
    prefetch: NonNegativeInt = 2
    """Number of following blocks whose reductions are in flight while a block computes."""
    needs_anchor: ClassVar[bool] = False
    syncs_in_forward: ClassVar[bool] = True

    @property
    def blocks_in_flight(self) -> int:
        return self.prefetch + 1


class OverlappedSection(SyncScheduleSection):
    """Streaming DiLoCo: fragments of the model synchronize in turn, each while training goes on."""

    kind: Literal["overlapped"] = "overlapped"
    """`overlapped`: a fragment's reduction has `steps` local steps to arrive."""
    steps: NonNegativeInt = 5
    """Local steps between sending a fragment and using its mean; at most a round's."""
    fragments: PositiveInt = 4
    """Parts that the blocks are dealt to; a round synchronizes each once, evenly spread."""
    fragment_layout: Literal["strided", "sequential"] = "strided"
    """`strided`: block i belongs to fragment i mod fragments; `sequential`: neighbors belong together."""
    alpha: Fraction = 0.5
    """alpha: a replica goes on with alpha x its own parameters + (1 - alpha) x the next anchor."""

    def blocks_of_fragments(self, blocks: int) -> list[list[int]]:
        """Return the blocks of each fragment, in forward order."""
        if self.fragment_layout == "strided":
            return [list(range(first, blocks, self.fragments)) for first in range(self.fragments)]
        ends = [blocks * (fragment + 1) // self.fragments for fragment in range(self.fragments)]
        return [list(range(first, end)) for first, end in zip([0, *ends[:-1]], ends, strict=True)]

    def hidden_steps(self, round_length: float) -> float:
        return min(round_length, self.fragments * self.steps)

    def parameters_in_flight(self, block_parameters: Sequence[int]) -> int:
        """Return the parameters of the largest fragment."""
        fragments = self.blocks_of_fragments(len(block_parameters))
        return max(sum(block_parameters[index] for index in fragment) for fragment in fragments)

    def check(self, period: PeriodSection, blocks: int | None) -> None:
        key = period.shortest_round
        if key is not None and self.steps > (shortest := getattr(period, key)):
            raise RecipeError(
                f"sync.schedule.steps is {self.steps}, but sync.period.{key} is {shortest}: a fragment's mean would arrive "
                f"after its next turn; give at most {shortest}"
            )
        if blocks is not None and self.fragments > blocks:
            raise RecipeError(
                f"sync.schedule.fragments is {self.fragments}, but the model has {blocks} blocks (its layers, embedding and "
                f"head); give at most {blocks}"
            )


class DelayedSection(SyncScheduleSection):
    """CO2: the reduction of a round has the whole next round to arrive; every round starts from the newest anchor."""

    kind: Literal["delayed"] = "delayed"
    """`delayed`: means are used a round late."""
    gap_penalty: bool = True
    """Divide a late mean by the staleness gap: its round's summed learning rates over those of the round that has
    just ended, at least 1."""

    def hidden_steps(self, round_length: float) -> float:
        return round_length

    def parameters_in_flight(self, block_parameters: Sequence[int]) -> int:
        return sum(block_parameters)


class WaitAvoidingSection(SyncScheduleSection):
    """WAGMA: after every step an average within a group, whose members change like a butterfly's wires and which no replica
    waits for; a late replica's last model is taken, and it merges the result. After every period an average over all
    replicas. Needs a power of two of replicas."""

    kind: Literal["wait_avoiding"] = "wait_avoiding"
    """`wait_avoiding`: a thread answers for a replica that is late."""
    group_size: PositiveInt | Literal["auto"] = "auto"
    """Replicas in a group, a power of two; `auto`: the square root of their number, rounded up to a power of two."""

    def hidden_steps(self, round_length: float) -> float:
        return round_length

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


class PullSection(Section):
    """PALSGD's pseudo-synchronization: some steps, drawn by each replica for itself, pull its parameters towards the
    anchor and compute no gradient."""

    probability: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """p: share of local steps that pull. The others run at the learning rate / (1 - p)."""
    strength: Annotated[float, Field(ge=0)] = 1.0
    """eta: a pull is theta <- theta - (lr x eta / p)(theta - anchor); lr x eta / p is at most 1. 0 skips steps only."""
    batch: Literal["keep", "drop"] = "keep"
    """What a pull does with its batch: leave it for the next gradient step, or pass over it as the published code does."""


class WireSection(Section):
    """What averages travel in. Blocks of 128 values share a scale; sums are taken in fp32."""

    kind: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    """`fp32` is master precision, unrounded; the others round twice: what a replica sends, and the mean."""
    error_feedback: bool = False
    """Error feedback: what a rank's rounding left out is added to its next message. Costs 4 bytes a parameter."""
    gradients: bool = False
    """Also round the gradients that synchronous steps average; without, they travel in fp32."""

    @property
    def needs_anchor(self) -> bool:
        """Return whether messages are rounded, which parameters are too large for: pseudo-gradients are sent instead."""
        return self.kind != "fp32"


AnyPeriod = EveryStepsSection | QsrSection | EverySecondsSection | EveryStepSection
AnyReduction = MeanSection | EditPenaltySection
AnyOuter = AverageSection | SgdSection | NesterovSection | MomentumSection
AnySchedule = BlockingSection | LayerwiseSection | OverlappedSection | DelayedSection | WaitAvoidingSection
Period = Annotated[AnyPeriod, Field(discriminator="kind"), BeforeValidator(kind)]
Reduction = Annotated[AnyReduction, Field(discriminator="kind"), BeforeValidator(kind)]
Outer = Annotated[AnyOuter, Field(discriminator="kind"), BeforeValidator(kind)]
Schedule = Annotated[AnySchedule, Field(discriminator="kind"), BeforeValidator(kind)]
Wire = Annotated[WireSection, BeforeValidator(kind)]


class SyncSection(Section):
    """Synchronization between replicas. `method` is a preset; each other key has the method's own default (table below)."""

    method: str = "edit"
    """The published method whose choices are the defaults of the keys below."""
    warmup_steps: NonNegativeInt = 0
    """Synchronous steps (gradients averaged over replicas) before local training begins."""
    warmup_until_lr: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Stay synchronous, beyond `warmup_steps`, until the learning rate has fallen to this share of its peak."""
    period: Period = Field(default_factory=EveryStepsSection)
    """When: `{kind: steps, every: H}`, `{kind: qsr, base, alpha}`, `{kind: seconds, every, min_steps}` or `every_step`."""
    reduction: Reduction = Field(default_factory=MeanSection)
    """What: `mean`, or EDiT's `{kind: edit_penalty, z, ema, min_rounds, temperature, clip, step_weight}`."""
    outer: Outer = Field(default_factory=AverageSection)
    """Outer step: `average`, `{kind: sgd, lr}`, or `nesterov` or `momentum` with `{lr, momentum, normalize}`."""
    schedule: Schedule = Field(default_factory=BlockingSection)
    """Schedule: `blocking`, `layerwise`, `{kind: overlapped, steps, fragments, alpha}`, `delayed` or
    `{kind: wait_avoiding, group_size}`."""
    pull: PullSection | None = None
    """PALSGD's local pull towards the anchor, `{probability, strength, batch}`, or `null`."""
    wire: Wire = Field(default_factory=WireSection)
    """What averages travel in: `fp32`, `bf16`, `int8` or `int4`; `{kind: int4, error_feedback: true}` carries errors over."""
    offload: bool = False
    """Keep anchor and outer momentum in CPU memory between synchronizations; pinned, where torch rounds a block's bytes up to a
    power of two."""
    verify_every: PositiveInt | None = 10
    """Synchronizations after which the next log line compares the replicas' anchors, by a sum of their bits; `null`: never."""

    @property
    def needs_anchor(self) -> bool:
        """Return whether replicas keep the parameters of the last synchronization (4 bytes per parameter). Only a plain
        average that replicas wait for and send unrounded needs none."""
        chosen = (self.reduction, self.outer, self.schedule, self.wire)
        return self.pull is not None or any(choice.needs_anchor for choice in chosen)
