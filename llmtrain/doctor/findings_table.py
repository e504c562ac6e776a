"""Terminal output of the doctor's findings as a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmtrain.doctor.finding import Finding, Level

STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
LOG_WIDTH = 140
"""Columns if the output is not a terminal."""


def console() -> Console:
    """Return a console for standard output, as wide as the terminal, or LOG_WIDTH if there is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)


def show(sections: Mapping[str, Sequence[Finding]], out: Console) -> None:
    """Print all findings by section, then a line with the number of problems and warnings."""
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, findings in sections.items():
        for number, finding in enumerate(findings):
            text = Text(finding.what)
            if finding.advice:
                text.append(f"\n→ {finding.advice}", style="italic")
            table.add_row(name if number == 0 else "", Text(finding.level.value, STYLES[finding.level]), text)
        table.add_section()
    out.print(table)
    out.print(verdict([finding for findings in sections.values() for finding in findings]))


def verdict(findings: Sequence[Finding]) -> str:
    """Return the number of problems and warnings as text."""
    problems, warnings = (sum(f.level == level for f in findings) for level in (Level.PROBLEM, Level.WARNING))
    if not problems and not warnings:
        return "everything is fine"
    return f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
