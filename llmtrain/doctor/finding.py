"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: fine · may hurt · training will fail or give wrong results."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What was seen, and what to do about it (nothing, if it is fine)."""

    level: Level
    what: str
    advice: str = ""


def ok(what: str) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, what)


def warning(what: str, advice: str) -> Finding:
    """Training works, but slower or less safely than it could."""
    return Finding(Level.WARNING, what, advice)


def problem(what: str, advice: str) -> Finding:
    """Training will not work like this."""
    return Finding(Level.PROBLEM, what, advice)


def has_problem(sections: Mapping[str, Sequence[Finding]]) -> bool:
    """Whether anything in a report keeps training from working."""
    return any(finding.level == Level.PROBLEM for findings in sections.values() for finding in findings)
