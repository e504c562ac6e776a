"""Findings: the entries of the doctor's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding: fine, may hurt, or training will fail or give wrong results."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """An observation, and advice on what to do about it (empty if there is none)."""

    level: Level
    what: str
    advice: str = ""


def ok(what: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(Level.OK, what)


def warning(what: str, advice: str) -> Finding:
    """Return a finding for training that works, but slower or less safely than it could."""
    return Finding(Level.WARNING, what, advice)


def problem(what: str, advice: str) -> Finding:
    """Return a finding for training that will fail or give wrong results."""
    return Finding(Level.PROBLEM, what, advice)


def has_problem(sections: Mapping[str, Sequence[Finding]]) -> bool:
    """Return whether any finding in a report is a problem."""
    return any(finding.level == Level.PROBLEM for findings in sections.values() for finding in findings)
