"""The `sync` section: the independent choices that a method of synchronization is made of.

when (`period`) x who (`group`) x what (`penalty`) x how applied (`outer`) x how run (`schedule`) x `pull` x `wire`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from llmtrain.config.section import DecayRate, Fraction, Section, kind

Normalize = Literal["none", "lr", "lr_sum"]


class EveryStepsSection(Section):
    """A round is `every` local steps."""

    kind: Literal["steps"] = "steps"
    """`steps`: a round is a fixed number of local steps."""
    every: PositiveInt = 128
    """Local steps H in a round."""


class QsrSection(Section):
    """QSR: rounds of max(base, floor((alpha / lr)^2)) local steps, longer as the learning rate falls."""

    kind: Literal["qsr"] = "qsr"
    """`qsr`: the length follows from the learning rate at the round's start."""
    base: PositiveInt = 4
    """Local steps at least; those of every round until the learning rate has fallen below alpha / sqrt(base)."""
    alpha: PositiveFloat
    """Growth, in units of the learning rate: with `optim.lr` x sqrt(base), rounds grow from the peak on."""


class EverySecondsSection(Section):
    """A-EDiT: each replica trains until its time is up, so fast ones do more local steps than slow ones."""

    kind: Literal["seconds"] = "seconds"
    """`seconds`: a round is a span of time; replicas do different numbers of local steps in it."""
    every: PositiveFloat = 600
    """Seconds from one meeting of the replicas to the next; the last one is shortened to end the run on its tokens."""
    min_steps: NonNegativeInt = 100
    """Local steps of all replicas together that a round needs; with fewer, the meeting passes without a synchronization."""


class EveryStepSection(Section):
    """Gradients are averaged over the replicas in every step: synchronous data parallelism."""

    kind: Literal["every_step"] = "every_step"
    """`every_step`: no local steps at all."""


class AllReplicasSection(Section):
    """Every synchronization is among all replicas."""

    kind: Literal["all"] = "all"
    """`all`: all replicas."""


class ButterflySection(Section):
    """WAGMA: after every step an average within a group of `size`, whose members change like a butterfly's wires;
    after every period one over all replicas. Needs a power of two of replicas."""

    kind: Literal["butterfly"] = "butterfly"
    """`butterfly`: a group of `size` in every step, all replicas at the end of a period."""
    size: PositiveInt | Literal["auto"] = "auto"
    """Replicas in a group, a power of two; `auto`: the square root of their number, rounded up to a power of two."""


class AverageSection(Section):
    """The next anchor is the replicas' mean."""

    kind: Literal["average"] = "average"
    """`average`: anchor <- anchor - D, the reduced pseudo-gradient."""


class SgdSection(Section):
    """SGD on the pseudo-gradient."""

    kind: Literal["sgd"] = "sgd"
    """`sgd`: anchor <- anchor - lr x D."""
    lr: PositiveFloat = 1.0
    """Outer learning rate."""


class NesterovSection(Section):
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


class MomentumSection(Section):
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


class PenaltySection(Section):
    """EDiT's pseudo-gradient penalty; each part can be switched off with `null`."""

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


class BlockingSection(Section):
    """Synchronize all blocks at the end of the round's last step."""

    kind: Literal["blocking"] = "blocking"
    """`blocking`: training waits while all blocks synchronize."""


class LayerwiseSection(Section):
    """Synchronize each block just before the next forward pass gathers it."""

    kind: Literal["layerwise"] = "layerwise"
    """`layerwise`: block by block inside the next forward pass."""
    prefetch: NonNegativeInt = 2
    """Number of following blocks whose reductions are in flight while a block computes."""


class OverlappedSection(Section):
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


class DelayedSection(Section):
    """CO2: the reduction of a round has the whole next round to arrive; every round starts from the newest anchor."""

    kind: Literal["delayed"] = "delayed"
    """`delayed`: means are used a round late."""
    gap_penalty: bool = True
    """Divide a late mean by the staleness gap: its round's summed learning rates over those of the round that has
    just ended, at least 1."""


class WaitAvoidingSection(Section):
    """WAGMA: group averages that no replica waits for; a late replica's last model is taken, and it merges the result."""

    kind: Literal["wait_avoiding"] = "wait_avoiding"
    """`wait_avoiding`: a thread answers for a replica that is late."""


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


AnyPeriod = EveryStepsSection | QsrSection | EverySecondsSection | EveryStepSection
AnyGroup = AllReplicasSection | ButterflySection
AnyOuter = AverageSection | SgdSection | NesterovSection | MomentumSection
AnySchedule = BlockingSection | LayerwiseSection | OverlappedSection | DelayedSection | WaitAvoidingSection
Period = Annotated[AnyPeriod, Field(discriminator="kind"), BeforeValidator(kind)]
Group = Annotated[AnyGroup, Field(discriminator="kind"), BeforeValidator(kind)]
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
    group: Group = Field(default_factory=AllReplicasSection)
    """Who: `all`, or WAGMA's `{kind: butterfly, size: S}`."""
    penalty: PenaltySection | None = None
    """What: EDiT's `{z, ema, min_rounds, temperature, clip, step_weight}`, or `null` for the plain mean."""
    outer: Outer = Field(default_factory=AverageSection)
    """Outer step: `average`, `{kind: sgd, lr}`, or `nesterov` or `momentum` with `{lr, momentum, normalize}`."""
    schedule: Schedule = Field(default_factory=BlockingSection)
    """Schedule: `blocking`, `layerwise`, `{kind: overlapped, steps, fragments, alpha}`, `delayed` or `wait_avoiding`."""
    pull: PullSection | None = None
    """PALSGD's local pull towards the anchor, `{probability, strength, batch}`, or `null`."""
    wire: Wire = Field(default_factory=WireSection)
    """What averages travel in: `fp32`, `bf16`, `int8` or `int4`; `{kind: int4, error_feedback: true}` carries errors over."""
    offload: bool = False
    """Keep anchor and outer momentum in CPU memory between synchronizations; pinned, where torch rounds a block's bytes up to a
    power of two."""
    verify_every: PositiveInt | None = 10
    """Synchronizations after which the next log line compares the replicas' anchors, by a sum of their bits; `null`: never."""
