"""Runs of the table's cases on the ranks of the pool: the whole run, and its second half once more from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from llmtrain.config import CheckpointSection
from llmtrain.reshard import first
from llmtrain.run_files import step_name
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.checkpoint_files import CheckpointWriter
from tests.distributed.real_engine import SEED, Case, Outcome, Run, mesh_of

TIMEOUT = 60.0


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Hold back the writing of checkpoints until the provided function is called, as on a disk so slow that training ends first."""
    held: list[CheckpointWriter] = []
    start = CheckpointWriter.start

    def write() -> None:
        for writing in held:
            start(writing, in_thread=True)

    with mock.patch.object(CheckpointWriter, "start", lambda writing, in_thread: held.append(writing)):
        yield write


def train(case: Case) -> tuple[Outcome, None]:
    """Train the case from beginning to end, without a checkpoint."""
    whole = Run(case, mesh_of(case.replicas, case.shard))
    whole.train(case.steps)
    outcome = whole.finish()
    whole.method.close()
    return outcome, None


def train_and_resume(case: Case, after: int, folder: Path) -> tuple[Outcome, Outcome]:
    """Train the case, and then its steps after `after` once more, by an engine and a method that have loaded the checkpoint of
    `after`. Return both outcomes."""
    mesh = mesh_of(case.replicas, case.shard)
    whole = Run(case, mesh)
    whole.train(after)
    checkpoints = _checkpoints(whole, folder)
    with held_back() as write:
        checkpoints.save(after, lambda: {"sums": whole.sums, "norms": whole.norms})
        whole.train(case.steps)
        outcome = whole.finish()
        write()
    checkpoints.wait()
    whole.method.close()
    torch.manual_seed(99)
    resumed = Run(case, mesh, after)
    rules = {"sums": first, "norms": first}
    loaded = _checkpoints(resumed, folder).load(folder / step_name(after), rules, SEED)
    resumed.sums, resumed.norms = loaded.progress["sums"], loaded.progress["norms"]
    resumed.train(case.steps)
    again = resumed.finish()
    resumed.method.close()
    return outcome, again


def _checkpoints(run: Run, folder: Path) -> Checkpointer:
    return Checkpointer(folder, run.mesh, run.engine, run.method, CheckpointSection(), TIMEOUT)
