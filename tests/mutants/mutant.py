"""Mutants (deliberate mistakes in llmtrain), and the format of the tables that list them."""

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
"""Tests of methods on made-up gradients, against an oracle in fp64 and against each other. Tables write `SCENARIOS`."""


@dataclass(frozen=True)
class Mutant:
    """A mistake that a developer could make, and the tests that should detect it."""

    name: str
    file: str
    old: str
    """Text that `new` replaces; it occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Test files or node ids, the fastest first."""
    equivalent: str = ""
    """Reason why no test can detect the mutant, or an empty string."""
    deep: str = ""
    """Reason why only tests marked `deep` detect the mutant, or an empty string."""

    @property
    def area(self) -> str:
        """Part of llmtrain that contains the file (`sync`, `train`, ...), or name of a module directly in llmtrain."""
        return Path(self.file).with_suffix("").parts[1]


CHANGE = re.compile(r"([-+])(?: (.*))?")
REASON = re.compile(r"(deep|equivalent): (.*)")


def read(file: str, table: str) -> Iterator[Mutant]:
    """Yield the mutants of a source file from its table.

    seen by unit/test_a.py, SCENARIOS
        name of a mutant
          - text that the mutant removes
          + text that the mutant inserts there

    `seen by` lists files or node ids in tests/, for all mutants up to the next `seen by`. Every line of removed text begins
    with `-`, and every line of inserted text with `+`. A space at the end of a line is written as ␣. A line `deep: ...` or
    `equivalent: ...` below the name states the reason for that attribute.
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
