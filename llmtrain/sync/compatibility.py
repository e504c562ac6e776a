"""Pairs of `sync` choices that cannot be combined, and why. All other combinations are allowed.

`recipe_check` applies these rules when it reads a recipe; docs/methods.md shows them as a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmtrain.config import PenaltySection, PullSection, SyncSection

CHOICES: dict[str, tuple[str, ...]] = {
    "period": ("steps", "qsr", "seconds", "every_step"),
    "group": ("all", "butterfly"),
    "penalty": ("mean", "penalty"),
    "outer": ("average", "sgd", "nesterov", "momentum"),
    "schedule": ("blocking", "layerwise", "overlapped", "delayed", "wait_avoiding"),
    "pull": ("none", "pull"),
    "wire": ("fp32", "bf16", "int8", "int4"),
    "error_feedback": ("off", "on"),
}
"""The kinds of each choice."""


def kinds_of(sync: SyncSection) -> dict[str, str]:
    """Return the kind of each choice in a recipe."""
    return {
        "period": sync.period.kind,
        "group": sync.group.kind,
        "penalty": "mean" if sync.penalty is None else "penalty",
        "outer": sync.outer.kind,
        "schedule": sync.schedule.kind,
        "pull": "none" if sync.pull is None else "pull",
        "wire": sync.wire.kind,
        "error_feedback": "on" if sync.wire.error_feedback else "off",
    }


@dataclass(frozen=True)
class Rule:
    """A forbidden pair: a kind in `these` of choice `first` with a kind in `those` of choice `second`."""

    first: str
    these: tuple[str, ...]
    second: str
    those: tuple[str, ...]
    why: str
    instead: str

    def forbids(self, kinds: Mapping[str, str]) -> bool:
        """Return whether `kinds` contains such a pair. `kinds` may cover only some of the choices."""
        return kinds.get(self.first) in self.these and kinds.get(self.second) in self.those


NO_ROUND = "gradients are averaged in every step, so there is no round"
NO_SAME_STEP = "replicas do different numbers of steps in a round of seconds"
NORMS_FIRST = "a penalty needs everybody's norms before a message is sent, and nobody waits for them"
RULES = (
    Rule(
        *("period", ("every_step",), "schedule", ("layerwise", "overlapped", "delayed", "wait_avoiding")),
        *(NO_ROUND, "use blocking, or a period of steps"),
    ),
    Rule(
        *("period", ("every_step",), "penalty", ("penalty",)),
        *(f"{NO_ROUND}, and no pseudo-gradient to penalize", "use sync.penalty=null, or a period of steps"),
    ),
    Rule(
        *("period", ("every_step",), "outer", ("sgd", "nesterov", "momentum")),
        *(NO_ROUND, "use sync.outer=average, or a period of steps"),
    ),
    Rule(
        *("period", ("every_step",), "pull", ("pull",)),
        *(f"{NO_ROUND}, and no anchor to be pulled to", "use sync.pull=null, or a period of steps"),
    ),
    Rule(
        *("period", ("every_step",), "group", ("butterfly",)),
        *(NO_ROUND, "use sync.group=all, or a period of steps"),
    ),
    Rule(
        *("period", ("every_step",), "error_feedback", ("on",)),
        *(f"{NO_ROUND}, and gradients are rounded without", "use error_feedback: false, or a period of steps"),
    ),
    Rule(
        *("period", ("seconds",), "schedule", ("overlapped", "delayed", "wait_avoiding")),
        *(f"{NO_SAME_STEP}, so there is no step at which all send or receive", "use blocking or layerwise"),
    ),
    Rule(
        *("period", ("seconds",), "group", ("butterfly",)),
        *(f"{NO_SAME_STEP}, and a butterfly's groups go by steps", "use sync.group=all, or a period of steps"),
    ),
    Rule(
        *("penalty", ("penalty",), "schedule", ("overlapped", "delayed", "wait_avoiding")),
        *(NORMS_FIRST, "use blocking or layerwise, or sync.penalty=null"),
    ),
    Rule(
        *("group", ("all",), "schedule", ("wait_avoiding",)),
        *("all replicas together wait for the slowest", "use sync.group=butterfly"),
    ),
    Rule(
        *("group", ("butterfly",), "schedule", ("blocking", "layerwise", "overlapped", "delayed")),
        *("groups average in every step, in the background", "use wait_avoiding, or sync.group=all"),
    ),
    Rule(
        *("error_feedback", ("on",), "wire", ("fp32",)),
        *("nothing is rounded, so there is no error to feed back", "use bf16, int8 or int4, or error_feedback: false"),
    ),
    Rule(
        *("error_feedback", ("on",), "schedule", ("wait_avoiding",)),
        *(
            "a late replica's message is sent more than once, and its error would be too",
            "use error_feedback: false, or another schedule",
        ),
    ),
)


def find_conflict(sync: SyncSection) -> str | None:
    """Return, in one line, why these choices cannot be combined; None if they can."""
    kinds = kinds_of(sync)
    for rule in RULES:
        if rule.forbids(kinds):
            given = f"{_as_override(rule.first, kinds)} does not go with {_as_override(rule.second, kinds)}"
            return f"{given}: {rule.why}; {rule.instead}"
    return None


def conflict_between(first: str, kind: str, second: str, other: str) -> Rule | None:
    """Return the rule that forbids a pair of kinds, or None."""
    return next((rule for rule in RULES if rule.forbids({first: kind, second: other})), None)


def _as_override(choice: str, kinds: Mapping[str, str]) -> str:
    """Return a choice in the form of an override, such as `sync.group=all`."""
    if choice == "error_feedback":
        return f"sync.wire.error_feedback={'true' if kinds[choice] == 'on' else 'false'}"
    if kinds[choice] == "penalty":
        return f"sync.penalty={{{', '.join(PenaltySection.model_fields)}}}"
    if kinds[choice] == "pull":
        return f"sync.pull={{{', '.join(PullSection.model_fields)}}}"
    return f"sync.{choice}={kinds[choice]}"
