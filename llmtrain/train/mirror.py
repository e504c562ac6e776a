"""Mirror of a run's checkpoints at another location (`checkpoint.mirror`). Checkpoints are copied to it in the
background, and fetched from it if the run's own disk is lost.

Training never waits for a copy, except for the last one at the end of the run. One copy is in flight at a time.
Of the checkpoints completed during a copy, only the newest is copied next. A failed copy prints one console
line, because the checkpoint is still complete on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.checkpoint_retention import CheckpointLoss, best_step, expired, loss_of, read_losses
from llmtrain.config import CheckpointSection, Recipe
from llmtrain.errors import CheckpointError, NewerFormatError, RecipeError, TrainingError, UserError, one_line
from llmtrain.files import atomic_write
from llmtrain.parallel.mesh import Mesh
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.run_files import LATEST, RECIPE, STATE_FILE, STEP_NAME, complete_checkpoints, step_name, step_of
from llmtrain.threads import LatestStepWorker
from llmtrain.train.checkpoint_files import Digest, find_corruption_on_any_rank, read_state
from llmtrain.train.rank_errors import POLL_SECONDS, run_on_main
from llmtrain.train.run_dir import RunDirectory, check_same_recipe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

STOPPED_SECONDS = 30.0
"""Maximum seconds for which a run that was asked to stop waits for its last copy: launchers and schedulers soon kill it."""
LOCAL = (None, "file", "local")
"""Protocols of the local file system, where folders must be created."""
UNUSABLE = (ImportError, ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError)
"""Errors of a wrong URL or of missing permissions, which do not pass by themselves."""


class RemoteRun:
    """Mirror of a run at a URL, either empty or with earlier copies."""

    def __init__(self, url: str):
        """Open the file system. Raises ImportError if the protocol's package is not installed, ValueError if
        fsspec does not know the protocol."""
        from fsspec.core import split_protocol, url_to_fs

        self.url = url
        options = {"auto_mkdir": True} if split_protocol(url)[0] in LOCAL else {}
        self._files: AbstractFileSystem
        self._files, self._root = url_to_fs(url, **options)
        self._losses: dict[int, CheckpointLoss | None] = {}  # read once from each checkpoint

    def check_owner(self, recipe: Recipe) -> None:
        """Raise RecipeError if the mirror belongs to another recipe, or the file system's error if it can't be written."""
        there = f"{self._root}/{RECIPE}"
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder) / RECIPE
            if self._files.exists(there):
                self._files.get_file(there, str(here))
                check_same_recipe(load_recipe(here), recipe, self.url)
            here.touch()
            self._files.put_file(str(here), f"{there}.tmp")
            self._files.rm(f"{there}.tmp")

    def write_recipe(self, recipe: Recipe) -> None:
        """Write the recipe, so that the mirror belongs to it."""
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder) / RECIPE
            here.write_text(resolved_yaml(recipe), encoding="utf-8")
            self._put_file(here, f"{self._root}/{RECIPE}")

    def complete(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return [step for step in self._steps() if self._files.exists(f"{self._path_of(step)}/{STATE_FILE}")]

    def losses(self) -> dict[int, CheckpointLoss | None]:
        """Return the validation losses of all complete checkpoints, by step."""
        known, self._losses = self._losses, {}
        for step in self.complete():
            self._losses[step] = known[step] if step in known else self._read_loss(step)
        return self._losses

    def _read_loss(self, step: int) -> CheckpointLoss | None:
        try:
            return loss_of(json.loads(self._files.cat_file(f"{self._path_of(step)}/{STATE_FILE}")))
        except ValueError:
            return None

    def download(self, step: int, here: Path) -> dict[str, Digest] | str:
        """Copy a checkpoint into the empty folder `here`. Returns its files with the digests in state.json, which the
        caller must compare, or a description of the damage if state.json is unreadable or a file is missing."""
        there = self._path_of(step)
        self._files.get_file(f"{there}/{STATE_FILE}", str(here / STATE_FILE))
        try:
            files = read_state(here)["files"]
        except NewerFormatError:  # not damaged
            raise
        except CheckpointError as error:
            return str(error).removeprefix(f"{here} ").removeprefix("is damaged: ")
        if gone := [name for name in sorted(files) if not self._files.exists(f"{there}/{name}")]:
            return f"{gone[0]} is gone"
        self._files.get([f"{there}/{name}" for name in files], [str(here / name) for name in files])
        return files

    def download_metrics(self, here: Path) -> None:
        """Replace the metrics file `here` with the mirror's copy, if one exists."""
        there, half_copied = f"{self._root}/metrics.jsonl", here.with_suffix(".tmp")
        if self._files.exists(there):
            self._files.get_file(there, str(half_copied))
            half_copied.rename(here)

    def upload(self, checkpoint: Path, step: int, metrics: Path) -> None:
        """Copy a complete checkpoint and the metrics to the mirror, replacing a checkpoint of the same step. Its state.json comes
        last, so that a partial copy counts as incomplete."""
        self._losses.pop(step, None)
        self._remove(step)
        there = self._path_of(step)
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != STATE_FILE)
        self._files.put([str(checkpoint / name) for name in names], [f"{there}/{name}" for name in names])
        self._put_file(metrics, f"{self._root}/metrics.jsonl")
        self._put_file(checkpoint / STATE_FILE, f"{there}/{STATE_FILE}")

    def retain(self, newest: int, section: CheckpointSection) -> None:
        """Delete expired checkpoints, and incomplete ones older than `newest`, the step of the checkpoint just
        copied."""
        losses = {step: loss for step, loss in self.losses().items() if step <= newest}
        half_copied = {step for step in self._steps() if step < newest} - losses.keys()
        for step in half_copied.union(expired(losses, section)):
            self._remove(step)

    def check_is_apart(self, folder: Path) -> None:
        """Raise RecipeError if the mirror is the run's own `folder`, where copying a checkpoint would first delete it."""
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._files, LocalFileSystem) and os.path.realpath(self._root) == os.path.realpath(folder):
            other = "give another one, or checkpoint.mirror=null"
            raise RecipeError(f"checkpoint.mirror: {self.url} is the run's own folder; {other}")

    def url_of(self, step: int) -> str:
        """Return a checkpoint's URL, for messages."""
        return f"{self.url}/checkpoints/{step_name(step)}"

    def _path_of(self, step: int) -> str:
        return f"{self._root}/checkpoints/{step_name(step)}"

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints in the mirror, complete or not."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, state.json first, so that a partly deleted checkpoint counts as incomplete."""
        for path in (f"{self._path_of(step)}/{STATE_FILE}", self._path_of(step)):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _put_file(self, here: Path, there: str) -> None:
        """Copy a file and rename it, so that a partial copy never appears under its final name."""
        self._files.put_file(str(here), f"{there}.tmp")
        self._files.mv(f"{there}.tmp", there)


def has_mirrored_checkpoint(recipe: Recipe) -> bool:
    """Return whether the run's mirror has a complete checkpoint. False if the run has no mirror, or it can't be read."""
    url = recipe.mirror_url
    if url is None:
        return False
    try:
        return bool(RemoteRun(url).complete())
    except Exception:  # every file system has its own exceptions
        return False


class Mirror:
    """Mirror of one run; does nothing without `checkpoint.mirror`. All ranks create one and make the same
    calls. The main rank does the work."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, note: Callable[[str], None], is_main: bool):
        """Report copies, fetches and their failures through `note`."""
        self.url = recipe.mirror_url
        self.recipe, self.directory, self.note, self.is_main = recipe, directory, note, is_main
        self.timeout_seconds = recipe.run.timeout_seconds
        self.newest: int | None = None
        """Step of the newest complete checkpoint in the mirror, as far as the main rank knows."""
        self._remote: RemoteRun
        self._problem = ""
        self.worker = LatestStepWorker(self._upload, "copies checkpoints")
        self._last_submitted: int | None = None
        """Step of the newest checkpoint submitted for copying."""
        self._last_complete: int | None = None
        """Step of the newest checkpoint that is in the mirror together with the best one up to it."""
        self._there_at_start: int | None = None
        """Step of the newest checkpoint that the mirror had at the start, which is therefore not copied again."""
        self._candidates: set[int] = set()
        """Steps of the checkpoints from which the best is being selected; then the step of the best, while it is copied."""

    # ---- at the start, on all ranks

    def open(self, mesh: Mesh) -> None:
        """Raise RecipeError, on every rank, if the mirror can't be written or contains another recipe."""
        if self.url is not None:
            self._on_main(mesh, self._open)

    def claim(self, mesh: Mesh) -> None:
        """Write the recipe to the mirror, which then belongs to this run. Called once the run directory has the recipe. Raises
        RecipeError, on every rank, if that fails."""
        if self.url is not None:
            self._on_main(mesh, lambda: self._remote.write_recipe(self.recipe))

    def fetch(self, mesh: Mesh, newer_than: int) -> Path | None:
        """Fetch the newest valid checkpoint after step `newer_than` (-1: any) into the run directory, together with the
        metrics. Returns the checkpoint's local path, or None if the mirror has none.

        Raises CheckpointError, on every rank, if `newer_than` is -1 and all checkpoints in the mirror are
        damaged. Raises RecipeError, on every rank, if the mirror can't be read.
        """
        if self.url is None:
            return None
        there = self._on_main(mesh, lambda: self._remote.complete())
        self.newest, problem = max(there, default=None), ""
        for step in sorted((step for step in there if step > newer_than), reverse=True):
            found = self._on_main(mesh, lambda step=step: self._download(step))
            if not isinstance(found, str):
                found = find_corruption_on_any_rank(self._temporary, found, mesh)
            where = f"{self.url}/checkpoints/{step_name(step)}"
            if found is None:
                self._on_main(mesh, lambda step=step: self._keep(step))
                self.note(f"fetched {where}")
                return self.directory.checkpoints / step_name(step)
            problem = f"{where} is damaged: {found}"
            self.note(f"{problem}; falling back to the previous one")
            self.newest = max((older for older in there if older < step), default=None)
            if self.is_main:
                shutil.rmtree(self._temporary, ignore_errors=True)
        if problem and newer_than < 0:
            raise CheckpointError(
                f"{problem}; none of the {len(there)} checkpoints is valid; restore one, or delete them to train from the start"
            )
        return None

    def upload_at_start(self, checkpoint: Path | None) -> None:
        """Queue the checkpoint that the run continues from. It is not copied if it is the newest one in the mirror; the best
        checkpoint up to it is copied if the mirror has none that is as good."""
        if checkpoint is not None:
            self._there_at_start = self.newest
            self.after_checkpoint(step_of(checkpoint))

    # ---- during training

    def after_checkpoint(self, step: int) -> None:
        """Queue the checkpoint of `step`, which is complete on disk, to be copied next. Returns immediately."""
        if self.url is None or not self.is_main:
            return
        self._last_submitted = step
        running, replaced = self.worker.submit(step)
        if replaced is not None:
            self.note(
                f"step {replaced} is not copied to {self.url}: step {running} is still being copied, and step {step} is next"
            )

    def pending_steps(self) -> set[int]:
        """Return the steps of the checkpoints that are being copied or are queued. Thread-safe."""
        return self.worker.pending_steps() | self._candidates

    def finish(self, mesh: Mesh, is_stopped: bool = False) -> str | None:
        """Wait for the copy of the last checkpoint, at most `run.timeout_seconds`, and for a stopped run at most
        STOPPED_SECONDS. Returns, on every rank, None, or the reason why the copy is missing."""
        if self.url is None:
            return None
        limit = min(STOPPED_SECONDS, self.timeout_seconds / 2) if is_stopped else self.timeout_seconds
        deadline = time.monotonic() + limit
        within = f"{limit:g} s" if is_stopped else f"{limit:g} s (run.timeout_seconds)"
        waiting = f"waiting for the copy to {self.url}, at most {within}"
        while mesh.broadcast_from_main(lambda: self._is_busy(deadline)):
            if waiting:
                self.note(waiting)
            waiting = ""
        return mesh.broadcast_from_main(lambda: self._missing(within))

    def _upload(self, step: int) -> None:
        self._problem, what = "", f"step {step}"
        try:
            if step != self._there_at_start:
                self._copy(step)
            self.newest, self._there_at_start, what = step, None, "the best checkpoint"
            if self.recipe.checkpoint.keep_best:
                self._copy_best(step)
        except Exception as error:  # every file system has its own exceptions
            self._problem = f"{what} could not be copied to {self.url}: {one_line(error)}"
            self.note(f"{self._problem}; training continues, and the next checkpoint is tried again")
            return
        self._last_complete = step
        try:
            self._remote.retain(step, self.recipe.checkpoint)
        except Exception as error:
            self.note(
                f"{self.url}: expired checkpoints could not be deleted: {one_line(error)}; the next copy tries again"
            )

    def _copy(self, step: int) -> None:
        began = time.monotonic()
        self._remote.upload(self.directory.checkpoints / step_name(step), step, self.directory.metrics)
        self.note(f"copied to {self._remote.url_of(step)} (in {time.monotonic() - began:.1f} s)")

    def _copy_best(self, newest: int) -> None:
        """Copy the best checkpoint up to step `newest`, unless the mirror has it or a better one. The mirror lacks it
        if it was completed during another copy and then replaced in the queue by a newer one."""
        try:
            # Set before losses are read, because the best checkpoint must not be deleted until it is copied.
            self._candidates = {step for step in complete_checkpoints(self.directory.checkpoints) if step <= newest}
            here = {
                step: loss
                for step, loss in read_losses(self.directory.checkpoints).items()
                if step in self._candidates and loss is not None  # None may be a file that can't be read now
            }
            there = {step: loss for step, loss in self._remote.losses().items() if step <= newest}
            best = best_step(there | here)
            self._candidates &= {best}
            if best is not None and best not in there:
                self._copy(best)
        finally:
            self._candidates = set()

    def _is_busy(self, deadline: float) -> bool:
        left = deadline - time.monotonic()
        return left > 0 and not self.worker.join(min(left, POLL_SECONDS))

    def _missing(self, within: str) -> str | None:
        if self._last_submitted is None or self._last_complete == self._last_submitted:
            return None
        what = "the best checkpoint" if self.newest == self._last_submitted else f"step {self._last_submitted}"
        late = f"{what} was not copied to {self.url} within {within}"
        return f"{self._problem or late}; it is complete in {self.directory.checkpoints}, start the same command again to copy it"

    # ---- on the main rank

    def _on_main(self, mesh: Mesh, work: Callable[[], Any]) -> Any:
        """Run `work` on the main rank and return its result on every rank. `work` may take any time, as long as fetched
        bytes keep arriving. Errors of the mirror's file system are raised on every rank: as RecipeError if it can't be
        used, and as TrainingError for any other, perhaps temporary, reason."""

        def attempt() -> Any:
            try:
                return work()
            except (UserError, TrainingError):
                raise
            except UNUSABLE as error:
                raise RecipeError(
                    f"checkpoint.mirror: {self.url}: {one_line(error)}; expected a folder or URL to read and write with fsspec"
                ) from error
            except Exception as error:  # every file system has its own exceptions
                raise TrainingError(
                    f"checkpoint.mirror: {self.url}: {one_line(error)}; start the same command again"
                ) from error

        return run_on_main(mesh, f"checkpoint.mirror: {self.url}", attempt, self.timeout_seconds, self._bytes_fetched)

    def _open(self) -> None:
        self._remote = RemoteRun(self.url)
        self._remote.check_is_apart(self.directory.path)
        self._remote.check_owner(self.recipe)

    def _download(self, step: int) -> Any:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._remote.download(step, self._temporary)

    def _keep(self, step: int) -> None:
        final = self.directory.checkpoints / step_name(step)
        self._remote.download_metrics(self.directory.metrics)
        shutil.rmtree(final, ignore_errors=True)  # a damaged checkpoint
        self._temporary.rename(final)
        atomic_write(final.parent / LATEST, final.name + "\n")

    def _bytes_fetched(self) -> int:
        try:
            return sum(path.stat().st_size for path in self._temporary.glob("*"))
        except OSError:  # another thread is just moving the folder
            return -1

    @property
    def _temporary(self) -> Path:
        return self.directory.checkpoints / "fetched.tmp"
