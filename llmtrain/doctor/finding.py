"""Findings: the entries of the doctor's report, and their table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmtrain.quantities import counted


class Level(StrEnum):
    """Severity of a finding: nothing to do, training may suffer, or training will fail or give wrong results."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """Observation, with advice on how to act on it (empty if no action is needed or known)."""

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


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
LOG_WIDTH = 140
"""Width in columns if the output is not a terminal."""


def console() -> Console:
    """Return a console for standard output, as wide as the terminal, or LOG_WIDTH if there is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)


def show_findings(sections: Mapping[str, Sequence[Finding]], out: Console) -> None:
    """Print findings by section, in columns that are as wide in every part of the report, and an empty line before each section."""
    table = Table(box=SIMPLE_HEAD, show_header=False, show_edge=False)
    table.add_column(no_wrap=True, min_width=len("other hosts"))
    table.add_column(no_wrap=True, min_width=len(Level.PROBLEM))
    table.add_column(overflow="fold")
    for name, findings in sections.items():
        for number, finding in enumerate(findings):
            text = Text(finding.what)
            if finding.advice:
                text.append(f"\n→ {finding.advice}", style="italic")
            table.add_row(name if number == 0 else "", Text(finding.level.value, STYLES[finding.level]), text)
        table.add_section()
    out.print()
    out.print(table)


def verdict(findings: Sequence[Finding]) -> str:
    """Return the number of problems and warnings as text."""
    problems, warnings = (sum(f.level == level for f in findings) for level in (Level.PROBLEM, Level.WARNING))
    if not problems and not warnings:
        return "everything is fine"
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"


def _count(number: int, what: str) -> str:
    return counted(number, what) if number else f"no {what}s"
