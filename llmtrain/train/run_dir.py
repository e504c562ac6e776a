"""What a run leaves behind, and whether a directory can be continued by a recipe."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from llmtrain.config import Recipe
from llmtrain.data.index import TOKENIZER
from llmtrain.errors import RecipeError
from llmtrain.recipe_loader import differences, load_recipe, resolved_yaml
from llmtrain.train.checkpoint_writer import atomic_write
from llmtrain.train.folder_lock import lock_folder
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
"""Keys that a run may be continued with other values of. They change nothing about the training itself, beyond the order
of additions, but for the number of replicas: that changes it by stated rules (`reshape`)."""


class RunDirectory:
    """`runs/<name>/`: recipe.yaml, tokenizer/, metrics.jsonl, tensorboard/, checkpoints/, summary.json, loss.png, samples.txt."""

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
        """Those that were written to the end, oldest first."""
        return [path for _, path in list_checkpoints(self.checkpoints)]

    def summary(self) -> dict[str, Any] | None:
        """summary.json of a run that has ended."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.exists() else None

    def finished(self) -> dict[str, Any] | None:
        """The summary, if this very run is complete."""
        summary = self.summary()
        done = (
            summary is not None and summary["stopped"] == "done" and summary["steps"] >= self.recipe.train.total_steps
        )
        return summary if done else None

    def trace_of(self, rank: int) -> Path:
        """Where a rank's timeline goes."""
        return self.path / "trace" / f"rank-{rank:05}.jsonl"

    def completed_message(self) -> str:
        """What to say of a finished run."""
        summary = self.finished()
        assert summary is not None
        return (
            f"{self.path} is complete: {summary['steps']} steps, validation loss {summary['final_eval_loss']:.4f}. "
            f"Start another with run.name=NAME, or delete the folder to train it again."
        )

    def check_recipe(self) -> None:
        """Raises RecipeError when the directory belongs to a run of another recipe."""
        there = self.path / "recipe.yaml"
        if not there.exists():
            return
        check_same_recipe(load_recipe(there), self.recipe, str(self.path))

    def open(self) -> None:
        """Make the directory and write the resolved recipe. By the main rank only. Raises RecipeError where that can't be done,
        or another process trains in it."""
        with self._os_errors_as_recipe_errors():
            self._lock = self._lock or lock_folder(self.path, "choose another run.name")
        for half_written in self.checkpoints.glob("*.tmp"):  # first of all: they may be what fills the disk
            shutil.rmtree(half_written, ignore_errors=True)
        with self._os_errors_as_recipe_errors():
            atomic_write(self.path / "recipe.yaml", resolved_yaml(self.recipe))
            (self.path / "summary.json").unlink(missing_ok=True)

    def copy_tokenizer(self, folder: Path) -> None:
        """A copy of the tokenizer in `folder`, so that the run can be exported where its data is not. Once, by the main
        rank only. Raises RecipeError where it can't be written."""
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
            # copytree gathers (from, to, why)
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
            raise RecipeError(
                f"run.out_dir: {self.path} can't be written ({reason}); make room, or choose another folder"
            ) from error

    def write_summary(self, summary: dict[str, Any]) -> None:
        """By the main rank, when the run ends."""
        atomic_write(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def check_same_recipe(there: Recipe, recipe: Recipe, where: str, ignored: Sequence[str] = ()) -> None:
    """Raise RecipeError when `there`, the recipe of what is in `where`, is not one that `recipe` can continue."""
    changed = differences(there, recipe, ignore=(*RESUMABLE_KEYS, *ignored))
    if changed:
        raise RecipeError(
            f"{where} holds a run of another recipe ({'; '.join(changed)}); choose another run.name, or delete that folder"
        )
