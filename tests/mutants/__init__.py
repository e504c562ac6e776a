"""Deliberate mistakes in llmtrain that the tests must detect. `python -m tests.mutation` tries them.

A table holds the mistakes in one source file. A module is named after a folder of llmtrain, and holds the tables of the
files in that folder. `sync_a_to_l` holds only those of files that begin with these letters, and `llmtrain_*` those of
files directly in llmtrain.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.mutants.mutant import Mutant, read

TABLES: dict[str, dict[str, str]] = {
    name: import_module(f"{__name__}.{name}").TABLES
    for name in sorted(module.name for module in iter_modules(__path__))
    if name != "mutant"
}
"""Tables of mutants, by module and then by source file."""
MUTANTS: tuple[Mutant, ...] = tuple(
    mutant for tables in TABLES.values() for file, table in tables.items() for mutant in read(file, table)
)

__all__ = ["MUTANTS", "TABLES", "Mutant"]
