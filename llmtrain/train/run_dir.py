"""Run directory: the files that a run writes, the lock on them, and the check that a recipe may continue the run."""

from __future__ import annotations

import filecmp
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from llmtrain.config import Recipe
from llmtrain.data.dataset import TOKENIZER
from llmtrain.errors import PASSING, CheckpointError, RecipeError, TrainingError, UnavailableError, raise_if_no_answer
from llmtrain.files import atomic_write, check_path, is_held_elsewhere, lock_holder, set_aside, write_lock_holder
from llmtrain.quantities import counted
from llmtrain.recipe_diff import differences
from llmtrain.recipe_loader import load_recipe, resolved_yaml, stored_recipe
from llmtrain.run_files import CHECKPOINTS, EVALUATIONS, LOCK, METRICS, RECIPE, STEP_NAME, SUMMARY, complete_checkpoints
from llmtrain.sync.methods import inner_preset
from llmtrain.train.checkpoint_files import read_state
from llmtrain.train.run_length import LengthChange, length_key
from llmtrain.waiting import announced, where_locks_exist

RESUMABLE_KEYS = (
    "run.name",
    "run.out_dir",
    "run.timeout_seconds",
    "run.restarts",
    "run.on_replica_loss",
    "sync.verify_every",
    "checkpoint",
    "log",
    "eval",
    "data.cache_dir",
    "data.num_proc",
    "data.per_replica",
    "train.steps",
    "train.tokens",
    "train.global_batch",
    "train.micro_batch",
    "train.batch_shares",
    "train.gc_every",
    "parallel.replicas",
    "parallel.shards",
    "parallel.on_cpu",
    "parallel.in_process",
    "parallel.virtual_clock",
    "parallel.replica_backend",
    "parallel.connections",
    "parallel.replica_network",
    "parallel.shard_network",
    "parallel.allow_unencrypted",
    "parallel.shard_across_nodes",
    "parallel.engine",
    "parallel.reshard_after_forward",
    "parallel.zero_stage",
    "parallel.zero_offload",
    "parallel.deepspeed",
    "parallel.activation_checkpointing",
    "parallel.compile",
    "parallel.loss_chunk",
    "parallel.loss_kernel",
    "sync.offload",
)
"""Keys that may differ when a run is continued. In training, they change only how numbers are rounded, with five
exceptions. The virtual clock changes what A-EDiT and WAGMA do. Parts of the batch (`train.batch_shares`) change what
each replica reads. The number of replicas (`reshard`), their texts (`_site_changes`), and the run's length and global
batch (`run_length`) have their own rules."""
KEYS_WITH_LENGTH = ("optim.lr", "schedule", "sync.outer.lr", "sync.outer.momentum", "sync.outer.rounds")
"""Keys that may differ if the run's length or global batch does: those that determine the learning rate, and those that
`sync.outer: auto` derives from the length."""

MAX_NAMED = 5
"""Maximum number of differing keys that a message names."""


class RunDirectory:
    """Run directory `runs/<name>/`: recipe.yaml, tokenizer/, metrics.jsonl, tensorboard/, wandb/, trace/, profile/,
    out_of_memory/, checkpoints/, export/, eval/, summary.json, loss.png, samples.txt, and the files .lock, .lock.holder and
    wandb_id.txt."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        self.path = Path(recipe.run.out_dir) / recipe.run.name
        check_path(self.path)
        self.tokenizer = self.path / TOKENIZER
        self.metrics = self.path / METRICS
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / CHECKPOINTS
        self.profile = self.path / "profile"
        self.out_of_memory = self.path / "out_of_memory"
        self.plot = self.path / "loss.png"
        self.samples = self.path / "samples.txt"
        self._lock: FileLock | None = None

    def summary(self) -> dict[str, Any] | None:
        """Return the content of summary.json, or None if the run has not ended. Raises RecipeError if it is damaged,
        UnavailableError if its disk does not answer."""
        path = self.path / SUMMARY
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
            steps, loss = summary.get("steps", 0), summary.get("final_eval_loss")
            is_valid = (
                isinstance(summary["stopped"], str) and isinstance(steps, int) and isinstance(loss, float | int | None)
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, OSError):
                raise_if_no_answer(path, error)
            is_valid = False
        if not is_valid:
            raise RecipeError(f"{path} is damaged; delete it, and the run continues from its newest checkpoint")
        return summary

    def finished_summary(self) -> dict[str, Any] | None:
        """Return the summary if the run has trained all steps of the recipe, else None."""
        summary = self.summary()
        done = (
            summary is not None
            and summary["stopped"] == "done"
            and summary.get("steps", 0) >= self.recipe.train.total_steps
        )
        return summary if done else None

    def trace_of(self, rank: int) -> Path:
        """Return the path of the timeline that a rank records."""
        return self.path / "trace" / f"rank-{rank:05}.jsonl"

    def completed_message(self) -> str:
        """Return the console message for a complete run."""
        summary, key = self.finished_summary(), length_key(self.recipe)
        assert summary is not None
        twice = 2 * (self.recipe.train.steps or self.recipe.train.tokens or 0)
        newest = max(complete_checkpoints(self.checkpoints), default=None)
        longer = f"Train it longer with more {key}, such as {key}={twice}"
        if self.recipe.checkpoint.mirror is None and newest is None:
            longer = "It no longer has a checkpoint, so it can neither be trained longer nor exported"
        elif self.recipe.checkpoint.mirror is None and newest != summary["steps"]:
            longer = f"Its newest checkpoint is of step {newest}, so a run with more {key} would continue there"
        return (
            f"{self.path} is complete: {counted(summary['steps'], 'step')}, validation loss {summary['final_eval_loss'] or math.nan:.4f}. "
            f"{longer}; start another with run.name=NAME."
        )

    def check_recipe(self) -> None:
        """Raise RecipeError if the recipe can't continue the run in the directory: a key differs that must be equal, the global batch
        can't change, a shorter length leaves no steps to train, or a complete run has no checkpoint from which to train longer."""
        there = self.path / RECIPE
        if not there.exists():
            return
        change, summary = self.length_change(), self.summary() or {}
        # The recipe in the directory may be that of a start that failed before its first checkpoint.
        before = load_recipe(there) if change is None else change.before
        check_same_recipe(before, self.recipe, str(self.path))
        lost_checkpoints = change is None and summary.get("stopped") == "done"
        if lost_checkpoints:
            change = LengthChange(before, self.recipe, summary["steps"])
        if change is not None:
            change.check(str(self.path))
        if lost_checkpoints and change.is_change and self.recipe.checkpoint.mirror is None:
            self.check_may_begin()

    def check_may_begin(self) -> None:
        """Raise RecipeError if the directory's run is complete with fewer steps than the recipe's. Called if no
        checkpoint was found."""
        summary = self.summary()
        if summary is not None and summary["stopped"] == "done" and self.finished_summary() is None:
            raise RecipeError(
                f"{self.path} is complete after {counted(summary['steps'], 'step')}, but has no checkpoint to continue from; put one "
                "back, or choose another run.name"
            )

    def length_change(self) -> LengthChange | None:
        """Return the change of length since the newest checkpoint; None if there is no checkpoint or it can't be read."""
        state = self.newest_state()
        if state is None or "recipe" not in state:
            return None
        return LengthChange(stored_recipe(state["recipe"], str(self.path)), self.recipe, state["step"])

    def newest_state(self) -> dict[str, Any] | None:
        """Return the newest readable state.json of the run's checkpoints; None if there is none."""
        for path in reversed(complete_checkpoints(self.checkpoints).values()):
            with suppress(CheckpointError):
                return read_state(path)
        return None

    def lock(self) -> None:
        """Create and lock the directory, and delete partial checkpoints. The directory does not count as a run until `claim`
        writes the recipe. Main rank only. Raises RecipeError if the directory can't be written or another process on this host
        trains in it, TrainingError if a process on another host does, and UnavailableError if the disk does not answer, or is
        full and the run has a checkpoint."""
        with self._os_errors_as_user_errors():
            self._lock = self._lock or lock_folder(self.path, "choose another run.name")
        for half_written in self.checkpoints.glob("*.tmp"):  # first, because they may be filling the disk
            shutil.rmtree(half_written, ignore_errors=True)

    def claim(self) -> None:
        """Lock the directory, write the resolved recipe and delete an earlier summary. Main rank only. Raises errors as
        `lock` does."""
        self.lock()
        with self._os_errors_as_user_errors():
            atomic_write(self.path / RECIPE, resolved_yaml(self.recipe))
            (self.path / SUMMARY).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock the directory, if this process has locked it."""
        if self._lock is not None:
            self._lock.release()

    def copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer from `folder`, so that export does not need the data. Once the run has a checkpoint, its
        copy is not replaced. Main rank only. Raises RecipeError if the copy can't be written."""
        if self.tokenizer.exists():
            if complete_checkpoints(self.checkpoints) or _have_same_files(self.tokenizer, folder):
                return
            shutil.rmtree(self.tokenizer, ignore_errors=True)
        half_copied = self.tokenizer.with_suffix(".tmp")
        shutil.rmtree(half_copied, ignore_errors=True)
        with self._os_errors_as_user_errors():
            shutil.copytree(folder, half_copied, copy_function=shutil.copyfile)
            half_copied.rename(self.tokenizer)

    @contextmanager
    def _os_errors_as_user_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # shutil.Error has no number, but a list of (source, target, reason).
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or str(error)
            number = next((one for one in PASSING if os.strerror(one) in reason), error.errno)
            raise_if_no_answer(self.path, OSError(number, reason))
            cause = f"run.out_dir: {self.path} can't be written ({reason})"
            if number in PASSING and complete_checkpoints(self.checkpoints):  # launchers may try until there is room
                raise UnavailableError(f"{cause}; make room, then start the same command again") from error
            raise RecipeError(f"{cause}; make room, or choose another folder") from error

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename (to `.old`) the exports and evaluation results of steps after `step`. These steps will be trained
        again, so their old results must not count as the run's. Return their new paths. Main rank only. Raises OSError
        if one can't be renamed."""
        moved = []
        for path in sorted([*self.path.glob("export/step-*"), *self.path.glob(f"{EVALUATIONS}/*.json")]):
            if path.suffix in ("", ".json") and _step_of_result(path) > step:
                picture = path.with_suffix(".png")  # curves have one
                moved += [set_aside(one) for one in (path, picture) if one.exists()]
        return moved

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json when the run ends. Numbers that are not finite become null. Main rank only."""
        atomic_write(self.path / SUMMARY, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")


def _step_of_result(path: Path) -> int:
    """Return the step of an export, or the last step in a file of evaluation results; 0 if the file has no step."""
    if named := STEP_NAME.match(path.name):
        return int(named[1])
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return max(int(each["checkpoint_step"]) for each in content.get("checkpoints", [content]))
    return 0


def _finite(value: Any) -> Any:
    """Return `value` with None in place of each number that is not finite, also inside mappings and lists."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _have_same_files(one: Path, other: Path) -> bool:
    names = {path.name for folder in (one, other) for path in folder.iterdir()}
    equal, _, _ = filecmp.cmpfiles(one, other, names, shallow=False)
    return len(equal) == len(names)


def check_same_recipe(there: Recipe, recipe: Recipe, where: str) -> None:
    """Raise RecipeError if `recipe` can't continue the run of recipe `there`, which was found in `where`."""
    if changed := recipe_changes(there, recipe):
        is_of_model = any(line.startswith("model.") for line in changed)
        has_weights = not is_of_model and complete_checkpoints(Path(where) / CHECKPOINTS)
        begin = f", with model.from_weights={where} to begin with its weights" if has_weights else ""
        raise RecipeError(
            f"{where} holds a run of another recipe ({_shortened(changed, there, recipe)}); choose another run.name{begin}"
        )


def _shortened(changed: list[str], there: Recipe, recipe: Recipe) -> str:
    """Return the lines of `recipe_changes` as one line. If the method differs, leave out keys that differ because of
    it. Only count the lines beyond the first MAX_NAMED."""
    methods = [one.sync.method for one in (there, recipe)]
    if methods[0] != methods[1]:
        # An inner preset's lines begin with "optim.lr: ..." or "optim.muon.momentum: ...".
        follows = ("sync.", *(f"optim.{key}{end}" for one in methods for key in inner_preset(one) for end in ":."))
        named = next(line for line in changed if line.startswith("sync.method:"))
        changed = [f"{named}, and what follows from it", *(line for line in changed if not line.startswith(follows))]
    more = [f"and {len(changed) - MAX_NAMED} more"] if len(changed) > MAX_NAMED else []
    return "; ".join([*changed[:MAX_NAMED], *more])


def recipe_changes(there: Recipe, recipe: Recipe) -> list[str]:
    """Return a line for each key that keeps `recipe` from continuing `there`."""
    sizes = [(one.train.total_steps, one.train.global_batch) for one in (there, recipe)]
    with_length = () if sizes[0] == sizes[1] else KEYS_WITH_LENGTH
    return differences(there, recipe, ignore=(*RESUMABLE_KEYS, *with_length)) + _site_changes(there, recipe)


def _site_changes(there: Recipe, recipe: Recipe) -> list[str]:
    """Return a line for each site of both recipes whose text differs. Sites may be added and removed."""
    before, now = ({entry.name: entry.model_dump() for entry in one.data.per_replica} for one in (there, recipe))
    lines = []
    for name in before.keys() & now.keys():
        for key in (key for key, value in before[name].items() if value != now[name][key]):
            values = f"{before[name][key]!r} there, {now[name][key]!r} here"
            lines.append(f"{key} of {name} in data.per_replica: {values}")
    return sorted(lines)


PATIENCE_SECONDS, PATIENCE_WITH_OTHER_HOSTS = 10.0, 120.0
"""Seconds to wait for a process that may be about to end, on this host and on another one. If the other host was lost,
the server of a network file system keeps its lock for a while (NFSv4: for a lease, 90 s on Linux)."""


def lock_folder(folder: Path, otherwise: str) -> FileLock:
    """Lock a folder until the returned lock is deleted or the process ends, however it ends.

    Raises an error, which suggests `otherwise`, if another process holds the lock: RecipeError if that process is on this host,
    TrainingError if it is on another, because that host may have been lost and a later start may succeed. Raises OSError if the
    folder can't be written. On a file system without locks, newer versions of filelock use a file as the lock, and a process that
    is killed leaves it behind. With older versions, and on NFS without a lock server, one printed line says that nothing is
    locked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    with where_locks_exist(folder):
        try:
            with announced(f"the process that works in {folder} to end", PATIENCE_SECONDS):
                lock.acquire(timeout=PATIENCE_SECONDS)
        except Timeout:
            if not is_held_elsewhere(folder):
                raise RecipeError(
                    f"{lock_holder(folder)} works in {folder}; wait until it has ended, or {otherwise}"
                ) from None
            _await_other_host(lock, folder, otherwise)
    write_lock_holder(folder)
    return lock


def _await_other_host(lock: FileLock, folder: Path, otherwise: str) -> None:
    holder, longer = lock_holder(folder), PATIENCE_WITH_OTHER_HOSTS - PATIENCE_SECONDS
    try:
        with announced(f"{holder}, which works in {folder} or was lost", longer):
            lock.acquire(timeout=longer)
    except Timeout:
        raise TrainingError(
            f"{holder} works in {folder}, or its host was lost; start again when it has ended, {otherwise}, or if that host is "
            f"gone for good, delete {folder / '.lock'}"
        ) from None
