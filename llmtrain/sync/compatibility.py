"""Pairs of `sync` choices that cannot be combined, and why. All other combinations are allowed.

`recipe_check` applies these rules when it reads a recipe; docs/methods.md shows them as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import get_args

from llmtrain.config import (
    AnyOuter,
    AnyPeriod,
    AnyReduction,
    AnySchedule,
    MeanSection,
    MomentsSection,
    PullSection,
    SyncSection,
    WireSection,
)


def _kinds_in(sections: UnionType) -> tuple[str, ...]:
    return tuple(section.model_fields["kind"].default for section in get_args(sections))


CHOICES: dict[str, tuple[str, ...]] = {
    "period": _kinds_in(AnyPeriod),
    "reduction": _kinds_in(AnyReduction),
    "outer": _kinds_in(AnyOuter),
    "schedule": _kinds_in(AnySchedule),
    "pull": ("none", "pull"),
    "moments": ("none", "moments"),
    "wire": get_args(WireSection.model_fields["kind"].annotation),
    "error_feedback": ("off", "on"),
}
"""All kinds of each choice, by the key of `sync` (error feedback: of `sync.wire`)."""


OPTIONAL = {"pull": PullSection, "moments": MomentsSection}
"""Sections of the choices that may be `null`."""


def kinds_of(sync: SyncSection) -> dict[str, str]:
    """Return the kind that a recipe chooses for each key of `CHOICES`."""
    return {
        **{choice: getattr(sync, choice).kind for choice in ("period", "reduction", "outer", "schedule", "wire")},
        "pull": "none" if sync.pull is None else "pull",
        "moments": "none" if sync.moments is None else "moments",
        "error_feedback": "on" if sync.wire.error_feedback else "off",
    }


@dataclass(frozen=True)
class Rule:
    """Rule that one kind of a choice excludes certain kinds of other choices."""

    choice: str
    kind: str
    excludes: Mapping[str, tuple[str, ...]]
    """Excluded kinds, by choice."""
    why: str
    """Reason, which completes the error message."""

    def excluded(self, kinds: Mapping[str, str]) -> str | None:
        """Return the first choice whose kind in `kinds` is excluded, or None. `kinds` may cover only some of the choices."""
        if kinds.get(self.choice) != self.kind:
            return None
        return next((other for other, those in self.excludes.items() if kinds.get(other) in those), None)


ROUNDED = tuple(kind for kind in CHOICES["wire"] if kind != "fp32")
WEIGHTED = tuple(kind for kind in CHOICES["reduction"] if kind != MeanSection.model_fields["kind"].default)
"""Kinds of reductions with weights, on which replicas agree before they send: all kinds except the mean."""
NOT_BLOCKING = tuple(kind for kind in CHOICES["schedule"] if kind != "blocking")
RULES = (
    Rule(
        choice="wire",
        kind="topk",
        excludes={"period": ("every_step",), "schedule": ("wait_avoiding",)},
        why="values that topk leaves out must be sent later, but with this choice nothing keeps them",
    ),
    Rule(
        choice="wire",
        kind="2bit",
        excludes={"period": ("every_step",), "schedule": ("wait_avoiding",)},
        why="rounding errors of 2bit are so large that they must be sent later, but with this choice nothing keeps them",
    ),
    Rule(
        choice="period",
        kind="every_step",
        excludes={
            "schedule": NOT_BLOCKING,
            "reduction": WEIGHTED,
            "outer": tuple(kind for kind in CHOICES["outer"] if kind != "average"),
            "pull": ("pull",),
            "moments": ("moments",),
            "error_feedback": ("on",),
        },
        why="gradients are averaged in every step, so there is no round, no pseudo-gradient and no anchor",
    ),
    Rule(
        choice="period",
        kind="seconds",
        excludes={"schedule": ("overlapped", "wait_avoiding")},
        why="replicas take different numbers of steps in a timed round and wait for each other only at its end, so within the "
        "round they have no common step at which to send or receive",
    ),
    *(
        Rule(
            choice="reduction",
            kind=kind,
            excludes={"schedule": ("wait_avoiding",)},
            why="replicas agree on their weights before a message is used, and group averages do not wait for late ones",
        )
        for kind in WEIGHTED
    ),
    Rule(
        choice="reduction",
        kind="radial",
        excludes={"wire": ("topk", "2bit")},
        why="a message that leaves values out shortens the mean; radial would lengthen it again, although the values are sent later",
    ),
    Rule(
        choice="moments",
        kind="moments",
        excludes={"reduction": WEIGHTED},
        why="moments are averaged without weights, so the moments of an excluded replica would reach all replicas",
    ),
    Rule(
        choice="outer",
        kind="gpa",
        excludes={
            "schedule": NOT_BLOCKING,
            "reduction": ("radial", "median_norm", "edit_penalty"),
            "pull": ("pull",),
            "wire": ROUNDED,
        },
        why="replicas continue from a point away from the anchor, so their pseudo-gradients are not small",
    ),
    Rule(
        choice="error_feedback",
        kind="on",
        excludes={"wire": ("fp32",)},
        why="fp32 messages are not rounded, so there is no error to feed back",
    ),
    Rule(
        choice="error_feedback",
        kind="off",
        excludes={"wire": ("2bit", "topk")},
        why="the values and rounding errors that a message leaves out would never be sent",
    ),
    Rule(
        choice="error_feedback",
        kind="on",
        excludes={"schedule": ("wait_avoiding",)},
        why="a message of a late replica is sent more than once, and its error would be added more than once",
    ),
)


def find_conflict(sync: SyncSection) -> str | None:
    """Return one line that says why these choices cannot be combined and gives alternatives; None if they can be combined."""
    kinds = kinds_of(sync)
    if sync.wire.gradients and sync.wire.kind in ("fp32", "2bit", "topk"):
        why = (
            "rounds nothing" if sync.wire.kind == "fp32" else "would lose the parts of gradients that it does not send"
        )
        return f"sync.wire.gradients is true, but {sync.wire.kind} {why}; use bf16, int8, int4 or fp4, or leave it out"
    for rule in RULES:
        if (other := rule.excluded(kinds)) is not None:
            given = f"{_as_override(rule.choice, rule.kind)} can't be combined with {_as_override(other, kinds[other])}"
            allowed = [kind for kind in CHOICES[other] if kind not in rule.excludes[other]]
            others = [
                kind for kind in CHOICES[rule.choice] if not conflict_between(rule.choice, kind, other, kinds[other])
            ]
            instead = _as_override(rule.choice, others[0]) if len(others) == 1 else f"another sync.{rule.choice}"
            return f"{given}: {rule.why}; use {_alternatives(other, allowed)}, or {instead}"
    if sync.period.averages_gradients and sync.wire.kind != "fp32" and not sync.wire.gradients:
        return (
            f"sync.wire is {sync.wire.kind}, but with sync.period=every_step only gradients are sent, and they are not rounded; add "
            "sync.wire.gradients=true, or use fp32"
        )
    return None


def conflict_between(first: str, kind: str, second: str, other: str) -> Rule | None:
    """Return the rule that forbids combining `kind` of the choice `first` with the kind `other` of `second`, or None."""
    return next((rule for rule in RULES if rule.excluded({first: kind, second: other}) is not None), None)


def _alternatives(choice: str, kinds: list[str]) -> str:
    first, *others = kinds
    return " or ".join([", ".join([_as_override(choice, first), *others[:-1]]), *others[-1:]])


def _as_override(choice: str, kind: str) -> str:
    """Return a choice in the form of an override, such as `sync.schedule=blocking`."""
    if choice == "error_feedback":
        return f"sync.wire.error_feedback={'true' if kind == 'on' else 'false'}"
    if choice in OPTIONAL:
        keys = ", ".join(OPTIONAL[choice].model_fields)
        return f"sync.{choice}={'null' if kind == 'none' else f'{{{keys}}}'}"
    return f"sync.{choice}={kind}"
