"""Reductions of the `sync` section, which combine the replicas' pseudo-gradients into one."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from llmtrain.config.section import Count, Fraction, Section


class ReductionSection(Section):
    """Base of the reductions, which combine the replicas' pseudo-gradients into one."""

    needs_anchor: ClassVar[bool] = False
    """True if this choice needs an anchor: the parameters of the last synchronization."""
    steps_before_sending: ClassVar[int] = 0
    """Local steps after which a message that overlaps with training is sent, because replicas agree on their weights first."""
    counts_tokens: ClassVar[bool] = False
    """True if the weights depend on the tokens of the local steps."""


class MeanSection(ReductionSection):
    """Unweighted mean over the replicas."""

    kind: Literal["mean"] = "mean"
    """`mean`: the unweighted mean."""


class WeightedSection(ReductionSection):
    """Base of the reductions whose weights follow from values that all replicas exchange before they send pseudo-gradients."""

    needs_anchor: ClassVar[bool] = True
    steps_before_sending: ClassVar[int] = 1


class TokenWeightedSection(WeightedSection):
    """Mean weighted by the work behind each pseudo-gradient (Decoupled DiLoCo)."""

    kind: Literal["token_weighted"] = "token_weighted"
    """`token_weighted`: the weight of a replica is its tokens x its tokens per step in the round, divided by the sum of all."""
    counts_tokens: ClassVar[bool] = True


class RadialSection(WeightedSection):
    """Mean direction times mean norm of the pseudo-gradients of a block (Decoupled DiLoCo's radial-directional averaging). The
    plain mean of replicas that moved in different directions is shorter than any of them."""

    kind: Literal["radial"] = "radial"
    """`radial`: the mean of the directions, with the mean of the norms as its length."""


class MedianNormSection(WeightedSection):
    """Mean of pseudo-gradients that are rescaled to the median of their norms, block by block, so that no replica dominates."""

    kind: Literal["median_norm"] = "median_norm"
    """`median_norm`: the mean of pseudo-gradients of equal norm, which is the median of the replicas' norms."""


class EditPenaltySection(WeightedSection):
    """EDiT's pseudo-gradient penalty. Each part can be switched off with `null`."""

    kind: Literal["edit_penalty"] = "edit_penalty"
    """`edit_penalty`: a clipped, weighted mean that excludes anomalous replicas."""
    z: PositiveFloat | None = 3.0
    """Anomaly elimination: excludes a pseudo-gradient whose norm is more than z standard deviations above its running mean;
    `null`: off."""
    ema: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Weight of the newest norm in the running mean and variance, which are bias-corrected."""
    min_rounds: Annotated[int, Field(ge=2)] = 10
    """Rounds before a block of a replica can be excluded. A non-finite norm is always excluded."""
    statistics: Literal["adaptive", "paper"] = "adaptive"
    """`adaptive`: norms are divided by the round's summed learning rates; in a round that is shorter than usual, a norm may be
    larger by as much as is explained by steps in random directions, or by what `overlapped` keeps of the round before. An
    excluded norm enters the mean and variance, but at most z standard deviations above the mean; in the next round at most 2 z,
    then 4 z and so on. So a single spike hardly moves the threshold, and, with the default `ema`, a lasting rise of up to 100
    times is followed within 15 rounds. `paper`: norms as they are, and excluded ones never enter."""
    max_exclusions: Count | None = 20
    """Number of consecutive rounds in which a block of a replica is excluded that ends the run with an error; `null`: never."""
    temperature: PositiveFloat | None = 1.0
    """Weighted averaging: the weights are softmax(-norm / temperature); `null`: equal weights."""
    clip: PositiveFloat | None = 10.0
    """Clipping: maximum norm of the averaged pseudo-gradient of a block; `null`: off."""
    step_weight: Fraction = 0.0
    """r, for timed rounds: the weight of a replica is (1 - r) x the weight above + r x its share of the round's local steps."""
