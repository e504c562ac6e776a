"""Deliberate mistakes in llmtrain that the tests must see; `python -m tests.mutation` tries them."""

from __future__ import annotations

from tests.mutants import data, launch, parallel, results, sync, train
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *sync.MUTANTS,
    *parallel.MUTANTS,
    *train.MUTANTS,
    *data.MUTANTS,
    *launch.MUTANTS,
    *results.MUTANTS,
)

__all__ = ["MUTANTS", "Mutant"]
