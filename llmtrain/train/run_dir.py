"""Run directory: the files that a run writes, their lock, and the check that a recipe may continue them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llmtrain.config import Recipe
from llmtrain.data.index import TOKENIZER
from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import differences, load_recipe, resolved_yaml
from llmtrain.train.checkpoint_writer import atomic_write
from llmtrain.train.integrity import list_checkpoints

RESUMABLE_KEYS = (
    "run.out_dir",
    "run.timeout_seconds",
    "run.restarts",
    "run.on_replica_loss",
    "sync.verify_every",
    "checkpoint",
    "log",
    "eval",
    "data.cache_dir",
    "train.micro_batch",
    "train.gc_every",
    "parallel.replicas",
    "parallel.shards",
    "parallel.on_cpu",
    "parallel.replica_backend",
    "parallel.replica_network",
    "parallel.shard_network",
    "parallel.shard_across_nodes",
    "parallel.engine",
    "parallel.zero_stage",
    "parallel.zero_offload",
    "parallel.deepspeed",
)
"""Keys that may differ when a run is continued. They change nothing in training but the order of additions, except
for the number of replicas, which has its own rules (`reshard`)."""


class RunDirectory:
    """Run directory `runs/<name>/`: recipe.yaml, tokenizer/, metrics.jsonl, tensorboard/, wandb/, trace/, profile/,
    out_of_memory/, checkpoints/, export/, eval/, summary.json, loss.png, samples.txt, and the files .lock and
    wandb_id.txt."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.path = Path(recipe.run.out_dir) / recipe.run.name
        self.tokenizer = self.path / TOKENIZER
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.plot = self.path / "loss.png"
        self.samples = self.path / "samples.txt"
        self._lock: FileLock | None = None

    @property
    def checkpoint_paths(self) -> list[Path]:
        """Return the complete checkpoints, oldest first."""
        return [path for _, path in list_checkpoints(self.checkpoints)]

    def summary(self) -> dict[str, Any] | None:
        """Return the content of summary.json, or None if the run has not ended."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finished(self) -> dict[str, Any] | None:
        """Return the summary if this run is complete, else None."""
        summary = self.summary()
        done = (
            summary is not None and summary["stopped"] == "done" and summary["steps"] >= self.recipe.train.total_steps
        )
        return summary if done else None

    def trace_of(self, rank: int) -> Path:
        """Return the path of a rank's timeline."""
        return self.path / "trace" / f"rank-{rank:05}.jsonl"

    @property
    def profile(self) -> Path:
        """Return the folder of torch.profiler's traces."""
        return self.path / "profile"

    @property
    def out_of_memory(self) -> Path:
        """Return the folder for the memory summaries and snapshots of devices that ran out of memory."""
        return self.path / "out_of_memory"

    def completed_message(self) -> str:
        """Return the console message for a complete run."""
        summary = self.finished()
        assert summary is not None
        return (
            f"{self.path} is complete: {summary['steps']} steps, validation loss {summary['final_eval_loss']:.4f}. "
            f"Start another with run.name=NAME, or delete the folder to train it again."
        )

    def check_recipe(self) -> None:
        """Raise RecipeError if the directory belongs to a run of another recipe."""
        there = self.path / "recipe.yaml"
        if not there.exists():
            return
        check_same_recipe(load_recipe(there), self.recipe, str(self.path))

    def open(self) -> None:
        """Create and lock the directory, delete partial checkpoints, and write the resolved recipe. Main rank
        only. Raises RecipeError if the directory can't be written or another process trains in it."""
        with self._os_errors_as_recipe_errors():
            self._lock = self._lock or lock_folder(self.path, "choose another run.name")
        for half_written in self.checkpoints.glob("*.tmp"):  # first, because they may be filling the disk
            shutil.rmtree(half_written, ignore_errors=True)
        with self._os_errors_as_recipe_errors():
            atomic_write(self.path / "recipe.yaml", resolved_yaml(self.recipe))
            (self.path / "summary.json").unlink(missing_ok=True)

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer from `folder`, unless a copy exists, so that export does not need the data. Main rank
        only. Raises RecipeError if the copy can't be written."""
        if self.tokenizer.exists():
            return
        half_copied = self.tokenizer.with_suffix(".tmp")
        shutil.rmtree(half_copied, ignore_errors=True)
        with self._os_errors_as_recipe_errors():
            shutil.copytree(folder, half_copied, copy_function=shutil.copyfile)
            half_copied.rename(self.tokenizer)

    @contextmanager
    def _os_errors_as_recipe_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # copytree collects (source, target, reason)
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
            raise RecipeError(
                f"run.out_dir: {self.path} can't be written ({reason}); make room, or choose another folder"
            ) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json when the run ends. Main rank only."""
        atomic_write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def check_same_recipe(there: Recipe, recipe: Recipe, where: str, ignored: Sequence[str] = ()) -> None:
    """Raise RecipeError if `recipe` can't continue `there`, the recipe found in `where`."""
    changed = differences(there, recipe, ignore=(*RESUMABLE_KEYS, *ignored))
    if changed:
        raise RecipeError(
            f"{where} holds a run of another recipe ({'; '.join(changed)}); choose another run.name, or delete that folder"
        )


PATIENCE_SECONDS = 10.0
"""Seconds to wait for a process that is about to end."""


def lock_folder(folder: Path, otherwise: str) -> FileLock:
    """Lock a folder until the returned lock is deleted or the process ends, however it ends.

    Raises RecipeError, which suggests `otherwise`, if another process holds the lock. Raises OSError if the
    folder can't be written. File systems without locks offer no such protection.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    with suppress(NotImplementedError):
        try:
            lock.acquire(timeout=PATIENCE_SECONDS)
        except Timeout:
            raise RecipeError(f"another process works in {folder}; wait until it has ended, or {otherwise}") from None
    return lock
