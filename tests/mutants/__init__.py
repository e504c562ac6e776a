"""Deliberate mistakes in llmtrain that the tests must see; `python -m tests.mutation` tries them."""

from __future__ import annotations

from tests.mutants import (
    command_line,
    data,
    documents,
    exports,
    gpus,
    launch,
    length,
    networks,
    one_device,
    optimizers,
    parallel,
    results,
    schedules,
    shown,
    sparse,
    stream,
    sync,
    texts,
    times,
    token_files,
    tokenizing,
    train,
    turns,
    weighing,
    weights,
    wrong_inputs,
)
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *sync.MUTANTS,
    *schedules.MUTANTS,
    *weighing.MUTANTS,
    *parallel.MUTANTS,
    *one_device.MUTANTS,
    *optimizers.MUTANTS,
    *times.MUTANTS,
    *gpus.MUTANTS,
    *train.MUTANTS,
    *weights.MUTANTS,
    *length.MUTANTS,
    *data.MUTANTS,
    *texts.MUTANTS,
    *token_files.MUTANTS,
    *tokenizing.MUTANTS,
    *documents.MUTANTS,
    *stream.MUTANTS,
    *launch.MUTANTS,
    *networks.MUTANTS,
    *turns.MUTANTS,
    *sparse.MUTANTS,
    *exports.MUTANTS,
    *results.MUTANTS,
    *shown.MUTANTS,
    *command_line.MUTANTS,
    *wrong_inputs.MUTANTS,
)

__all__ = ["MUTANTS", "Mutant"]
