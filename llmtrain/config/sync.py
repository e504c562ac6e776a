"""The `sync` section: the independent choices that make up a synchronization method.

A method is one choice per axis: `period` (when replicas synchronize), `reduction` (how their pseudo-gradients are
combined), `outer` (how the result is applied), `schedule` (how the messages overlap with training), `pull`, `moments` and `wire`.

Each kind of a choice is a class in this file, in `sync_reductions` or in `sync_schedules`. The class knows the consequences of
the choice: the state that it keeps, the parameters in flight, and the checks that it needs. Its implementation is in
`llmtrain/sync`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from llmtrain.config.section import Count, CountOrZero, DecayRate, Fraction, Section, expand_kind, expand_period
from llmtrain.config.sync_reductions import (
    EditPenaltySection,
    MeanSection,
    MedianNormSection,
    RadialSection,
    TokenWeightedSection,
)
from llmtrain.config.sync_schedules import (
    BlockingSection,
    DelayedSection,
    LayerwiseSection,
    OverlappedSection,
    WaitAvoidingSection,
)

Normalize = Literal["none", "lr", "lr_sum"]


class PeriodSection(Section):
    """Base of the periods, which decide when replicas synchronize."""

    averages_gradients: ClassVar[bool] = False
    """True if every step averages gradients, so that there are no local steps and no rounds."""
    is_timed: ClassVar[bool] = False
    """True if a round lasts a fixed time, in which replicas take different numbers of steps."""
    follows_lr: ClassVar[bool] = False
    """True if the length of a round depends on the learning rate or on the length of the run."""
    shortest_round: ClassVar[str | None] = None
    """Key that holds the minimum number of local steps per round, or None."""

    @property
    def min_length(self) -> int | None:
        """Return the minimum number of local steps per round, or None if no key sets it."""
        return getattr(self, self.shortest_round) if self.shortest_round else None


class StepsSection(PeriodSection):
    """A fixed number of local steps per round."""

    kind: Literal["steps"] = "steps"
    """`steps`: a round has a fixed number of local steps."""
    every: Count = 128
    """Local steps H per round."""
    shortest_round: ClassVar[str | None] = "every"


class QsrSection(PeriodSection):
    """QSR's period: max(base, floor((alpha / lr)^power)) local steps per round, more as the learning rate falls."""

    kind: Literal["qsr"] = "qsr"
    """`qsr`: the learning rate at the start of a round sets its length."""
    base: Count = 4
    """Minimum local steps per round. All rounds have this length until the learning rate has fallen to
    alpha / (base + 1)^(1 / power)."""
    alpha: PositiveFloat
    """Growth rate, in units of the learning rate. With `optim.lr` x base^(1/power), rounds have `base` steps at the peak
    and grow as the rate decays."""
    power: PositiveFloat = 2.0
    """Exponent: 2 is QSR's quadratic rule; with 1, rounds grow in inverse proportion to the learning rate."""
    shortest_round: ClassVar[str | None] = "base"
    follows_lr: ClassVar[bool] = True


class EverySecondsSection(PeriodSection):
    """A-EDiT's period: a fixed time per round, in which fast replicas take more local steps than slow ones."""

    kind: Literal["seconds"] = "seconds"
    """`seconds`: a round lasts a fixed time; replicas take different numbers of local steps."""
    every: PositiveFloat = 600
    """Seconds from one exchange of step counts to the next. The last intervals are shortened so that the run ends at its number of
    tokens."""
    min_steps: CountOrZero = 100
    """Minimum local steps per round, summed over replicas. While a round has fewer, an exchange does not end it."""
    is_timed: ClassVar[bool] = True


class EveryStepSection(PeriodSection):
    """Synchronous data parallelism: every step averages gradients over the replicas."""

    kind: Literal["every_step"] = "every_step"
    """`every_step`: there are no local steps."""
    averages_gradients: ClassVar[bool] = True


class OuterSection(Section):
    """Base of the outer optimizers, which apply the reduced pseudo-gradient to the anchor."""

    needs_anchor: ClassVar[bool] = True
    """True if this choice needs an anchor: the parameters of the last synchronization."""
    state: ClassVar[tuple[str, ...]] = ()
    """Names, also in checkpoints, of the tensors that the optimizer keeps per block, each of the size of the parameters."""


class OuterLrSection(Section):
    """Outer learning rate over the rounds of a run."""

    lr_warmup: CountOrZero = 0
    """Rounds of linear warm-up before the first round with the full learning rate: round r of n such rounds uses r / (n + 1) of it."""
    lr_decay: CountOrZero = 0
    """Rounds after the warm-up over which the learning rate falls linearly to `lr_final`; 0: no decay."""
    lr_final: Fraction = 0.0
    """Learning rate after `lr_decay`, as a fraction of `lr`."""


class OuterRoundsSection(OuterLrSection):
    """Outer learning rate and momentum over the rounds of a run. Full momentum from the first round on overshoots in short runs,
    because the first rounds move the parameters in much the same direction."""

    momentum_warmup: CountOrZero = 0
    """Rounds of linear warm-up before the first round with the full momentum: round r of n such rounds uses r / (n + 1) of it."""


class AverageSection(OuterSection):
    """Plain parameter averaging: the next anchor is the mean of the replicas."""

    kind: Literal["average"] = "average"
    """`average`: anchor <- anchor - D, where D is the reduced pseudo-gradient."""
    needs_anchor: ClassVar[bool] = False


class SgdSection(OuterSection):
    """SGD on the pseudo-gradient."""

    kind: Literal["sgd"] = "sgd"
    """`sgd`: anchor <- anchor - lr x D."""
    lr: PositiveFloat = 1.0
    """Outer learning rate."""
    rounds: OuterLrSection = Field(default_factory=OuterLrSection)
    """Warm-up and decay over rounds, `{lr_warmup, lr_decay, lr_final}`."""


class NesterovSection(OuterSection):
    """SGD with Nesterov momentum on the pseudo-gradient."""

    kind: Literal["nesterov"] = "nesterov"
    """`nesterov`: b <- momentum x b + D; anchor <- anchor - lr x (D + momentum x b)."""
    lr: PositiveFloat = 0.7
    """Outer learning rate."""
    momentum: DecayRate = 0.9
    """Outer momentum."""
    rounds: OuterRoundsSection = Field(default_factory=OuterRoundsSection)
    """Warm-up and decay over rounds, `{momentum_warmup, lr_warmup, lr_decay, lr_final}`."""
    normalize: Normalize = "none"
    """Normalize b by the inner learning rate, so that it fits rounds of any length: b <- momentum x b + D / g, and
    anchor <- anchor - lr x (D + momentum x g x b), where g is the last learning rate of the round (`lr`) or the sum of its learning
    rates (`lr_sum`)."""
    state: ClassVar[tuple[str, ...]] = ("momentum",)


class MomentumSection(OuterSection):
    """SGD with heavy-ball momentum on the pseudo-gradient (SlowMo, CO2)."""

    kind: Literal["momentum"] = "momentum"
    """`momentum`: b <- momentum x b + D; anchor <- anchor - lr x b."""
    lr: PositiveFloat = 1.0
    """Outer (slow) learning rate."""
    momentum: DecayRate = 0.5
    """Outer (slow) momentum."""
    rounds: OuterRoundsSection = Field(default_factory=OuterRoundsSection)
    """Warm-up and decay over rounds, as for `nesterov`."""
    clip: PositiveFloat | None = None
    """CO2's momentum clipping: limits every element of b to [-clip, clip]; `null`: off."""
    normalize: Normalize = "none"
    """Normalization of b, as for `nesterov`. SlowMo uses `lr`."""
    state: ClassVar[tuple[str, ...]] = ("momentum",)


class PrimalAverageSection(OuterSection):
    """Generalized primal averaging (GPA): the anchor x is a running average of a fast point z, and replicas compute gradients at y,
    between the two. Meant for one replica and H = 1, where it has the effect of an outer step, but without rounds."""

    kind: Literal["gpa"] = "gpa"
    """`gpa`: z <- z + (theta - y); x <- decay x + (1 - decay) z; y <- share x + (1 - share) z, where replicas continue."""
    decay: DecayRate = 0.9967
    """Decay of the average per synchronization: 0.9934, 0.9967 and 0.9984 smooth as much as H = 16, 32 and 64 would."""
    share: Fraction = 0.7
    """Share of the average in the point at which gradients are computed."""
    state: ClassVar[tuple[str, ...]] = ("momentum",)


class AutoOuterSection(OuterSection):
    """Nesterov momentum that fits the number and length of rounds: the best setting in a study of short runs with AdamW, scaled to
    this run (docs/results.md)."""

    kind: Literal["auto"] = "auto"
    """`auto`: a `nesterov` step whose learning rate, momentum and warm-up follow from the number of rounds of the run. These are
    decided when the recipe is loaded; `recipe show` prints them."""
    state: ClassVar[tuple[str, ...]] = ("momentum",)


class PullSection(Section):
    """PALSGD's pseudo-synchronization: random local steps that pull the parameters toward the anchor instead of computing a
    gradient. Each replica draws them independently."""

    probability: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """p: probability that a local step is a pull. The other steps use the learning rate / (1 - p)."""
    strength: Annotated[float, Field(ge=0)] = 1.0
    """eta: a pull is theta <- theta - (lr x eta / p)(theta - anchor), where lr x eta / p is at most 1. With 0, a
    pull only skips the gradient."""
    batch: Literal["keep", "drop"] = "keep"
    """Batch of a pull: `keep` leaves it to the next gradient step; `drop` skips it, as the published code does."""


class MomentsSection(Section):
    """DES-LOC's averages of the inner optimizer's moments over the replicas, at the end of some rounds. They are sent in master
    precision, while training waits."""

    first: Count | None = 3
    """Rounds from one average of the first moments (or Muon's momenta) to the next; `null`: never."""
    second: Count | None = 6
    """Rounds from one average of the second moments to the next; `null`: never."""


class WireSection(Section):
    """Format of the messages between replicas. In `int8`, `int4`, `fp4` and `2bit`, 128 values share a scale. Sums are taken in
    master precision."""

    kind: Literal["fp32", "bf16", "int8", "int4", "fp4", "2bit", "topk"] = "fp32"
    """`fp32` is master precision, unrounded; `bf16`, `int8`, `int4`, `fp4` (a sign and an exponent) and `2bit` (four levels for normally
    distributed values) round twice: what a replica sends, and the mean. `topk` sends the largest values of each chunk of
    4096, to every other replica. `2bit` and `topk` need `error_feedback`."""
    keep: Annotated[int, Field(ge=1, le=4096)] = 64
    """Values that `topk` sends of each chunk of 4096."""
    values: Literal["2bit", "fp32"] = "2bit"
    """Form of a value of `topk`: `2bit`, a sign and one of two magnitudes per chunk, or `fp32`, unrounded."""
    error_feedback: bool = False
    """Error feedback: add the values and rounding errors that a rank's message has left out to its next message. Costs 4 bytes per
    parameter."""
    feedback_decay: Fraction = 1.0
    """Decay factor of the error-feedback buffer, per message."""
    gradients: bool = False
    """Round the gradients that synchronous steps average, too (`bf16`, `int8`, `int4`, `fp4`). They are sent in fp32 otherwise."""

    @property
    def needs_anchor(self) -> bool:
        """Return whether messages are rounded. Rounded messages hold pseudo-gradients instead of parameters, because pseudo-gradients
        are small."""
        return self.kind != "fp32"


AnyPeriod = StepsSection | QsrSection | EverySecondsSection | EveryStepSection
AnyReduction = MeanSection | TokenWeightedSection | RadialSection | MedianNormSection | EditPenaltySection
AnyOuter = AverageSection | SgdSection | NesterovSection | MomentumSection | PrimalAverageSection
AnySchedule = BlockingSection | LayerwiseSection | OverlappedSection | DelayedSection | WaitAvoidingSection
CHOICE = (Field(discriminator="kind"), BeforeValidator(expand_kind))
"""Validation of a union of sections: `kind` selects the section, and a string is short for it."""


class SyncSection(Section):
    """Synchronization between replicas. `method` is a preset, which sets defaults of the other keys (table below)."""

    method: str = "edit"
    """Published method whose choices are the defaults of the keys below."""
    warmup_steps: CountOrZero = 0
    """Synchronous steps, which average gradients over replicas, before local training begins."""
    warmup_until_lr: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the peak to which the learning rate must have fallen, in addition to `warmup_steps`, before local training
    begins; `null`: `warmup_steps` alone decides."""
    period: Annotated[AnyPeriod, CHOICE[0], BeforeValidator(expand_period)] = Field(default_factory=StepsSection)
    """When replicas synchronize: `{kind: steps, every: H}` (short form: `H`), `{kind: qsr, base, alpha}`, `{kind: seconds, every,
    min_steps}` or `every_step`."""
    reduction: Annotated[AnyReduction, *CHOICE] = Field(default_factory=MeanSection)
    """Combination of the pseudo-gradients: `mean`, `token_weighted`, `radial`, `median_norm`, or EDiT's `{kind: edit_penalty, z, ema,
    min_rounds, statistics, max_exclusions, temperature, clip, step_weight}`."""
    outer: Annotated[AnyOuter | AutoOuterSection, *CHOICE] = Field(default_factory=AverageSection)
    """Outer step: `average`, `{kind: sgd, lr, rounds}`, `nesterov` or `momentum` with `{lr, momentum, rounds, normalize}`,
    `{kind: gpa, decay, share}`, or `auto`: a `nesterov` step that fits the number of rounds."""
    schedule: Annotated[AnySchedule, *CHOICE] = Field(default_factory=BlockingSection)
    """Overlap of messages with training: `blocking`, `layerwise`, `{kind: overlapped, steps, fragments, alpha}`, `delayed` or
    `{kind: wait_avoiding, group_size}`."""
    pull: PullSection | None = None
    """PALSGD's local pull toward the anchor, `{probability, strength, batch}`, or `null`."""
    moments: MomentsSection | None = None
    """DES-LOC's averages of the inner optimizer's moments, `{first, second}`, or `null`: each replica keeps its own."""
    wire: Annotated[WireSection, BeforeValidator(expand_kind)] = Field(default_factory=WireSection)
    """Message format: `fp32`, `bf16`, `int8`, `int4`, `fp4`, or with error feedback, which `2bit` and `topk` need, `{kind: 2bit,
    error_feedback: true}`."""
    offload: bool = False
    """Keep anchor and outer momentum in CPU memory between synchronizations. On GPUs the memory is pinned, for which torch
    rounds the bytes of a block up to a power of two."""
    verify_every: Count | None = 10
    """Interval, in synchronizations, at which a log line compares checksums of the replicas' anchors; `null`: never."""

    @property
    def needs_anchor(self) -> bool:
        """Return whether replicas keep the parameters of the last synchronization (4 bytes per parameter). Only a plain
        average that replicas wait for and send unrounded needs none."""
        chosen = (self.reduction, self.outer, self.schedule, self.wire)
        return self.pull is not None or any(choice.needs_anchor for choice in chosen)
