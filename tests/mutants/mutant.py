"""Mutants, and the format of the tables that hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCENARIOS = (
    "tests/distributed/test_sync_oracle.py",
    "tests/distributed/test_methods_oracle.py",
    "tests/distributed/test_sync_equivalences.py",
    "tests/distributed/test_methods_equivalences.py",
)
"""Methods on made-up gradients, beside an oracle in fp64 and beside one another. Tables have this name for them."""


@dataclass(frozen=True)
class Mutant:
    """A mistake that somebody could make, and tests that should see it."""

    name: str
    file: str
    old: str
    """What it changes; occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids, the quickest first."""
    equivalent: str = ""
    """Why no test can see it, where none can."""
    deep: str = ""
    """Why only tests marked `deep` see it, where that is so."""

    @property
    def area(self) -> str:
        """The part of llmtrain that it is in (`sync`, `train`, ...), or a module beside the parts."""
        return Path(self.file).with_suffix("").parts[1]


CHANGE = re.compile(r"([-+])(?: (.*))?")
REASON = re.compile(r"(deep|equivalent): (.*)")


def read(file: str, table: str) -> Iterator[Mutant]:
    """Read a source file's mutants from a table:

    seen by unit/test_a.py, SCENARIOS
        name of a mutant
          - text that it takes out
          + text that it puts in its place

    `seen by` names files or node ids in tests/, and holds until the next one. Each line of a text has a mark; a space at
    its end is written as ␣. A line `deep: ...` or `equivalent: ...` below a name gives the reason for it.
    """
    tests: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = []
    for line in filter(str.strip, table.split("\n")):
        text = line.strip()
        if text.startswith("seen by "):
            tests = tuple(_tests(text.removeprefix("seen by ").split(", ")))
        elif change := CHANGE.fullmatch(text):
            rows[-1][change[1]].append(re.sub("␣$", " ", change[2] or ""))
        elif reason := REASON.fullmatch(text):
            rows[-1][reason[1]] = reason[2]
        else:
            rows.append({"name": text, "tests": tests, "-": [], "+": []})
    for row in rows:
        yield Mutant(file=file, old="\n".join(row.pop("-")), new="\n".join(row.pop("+")), **row)


def _tests(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        yield from SCENARIOS if name == "SCENARIOS" else (f"tests/{name}",)
