"""Files of a run's mirror, at any URL that fsspec supports.

    URL/recipe.yaml                   recipe of the run
        metrics.jsonl                 as of the newest checkpoint
        checkpoints/step-00001000/    as in the run directory; state.json is copied last

File system errors are passed through, because each file system raises its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.config import CheckpointSection, Recipe
from llmtrain.errors import CheckpointError
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.train.integrity import NAME, STATE_FILE, Digest, folder_name, read_state
from llmtrain.train.run_dir import check_same_recipe

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

LOCAL = (None, "file", "local")
"""Protocols of the local file system, where folders must be created."""


class RemoteRun:
    """A run's mirror at a URL: empty, or holding earlier copies."""

    def __init__(self, url: str):
        """Open the file system. Raises ImportError if the protocol's package is not installed, ValueError if
        fsspec does not know the protocol."""
        from fsspec.core import split_protocol, url_to_fs

        self.url = url
        options = {"auto_mkdir": True} if split_protocol(url)[0] in LOCAL else {}
        self._files: AbstractFileSystem
        self._files, self._root = url_to_fs(url, **options)

    def check_owner(self, recipe: Recipe) -> None:
        """Write the recipe to the mirror. Raises RecipeError if the mirror holds another recipe."""
        there = f"{self._root}/recipe.yaml"
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder) / "recipe.yaml"
            if self._files.exists(there):
                self._files.get_file(there, str(here))
                check_same_recipe(load_recipe(here), recipe, self.url)
            here.write_text(resolved_yaml(recipe))
            self._put_file(here, there)

    def complete(self) -> list[int]:
        """Return the steps of all complete checkpoints, oldest first."""
        return [step for step in self._steps() if self._files.exists(f"{self._path_of(step)}/{STATE_FILE}")]

    def download(self, step: int, here: Path) -> dict[str, Digest] | str:
        """Copy a checkpoint into the empty folder `here`. Returns its files as listed in state.json, or a
        description of the damage."""
        there = self._path_of(step)
        self._files.get_file(f"{there}/{STATE_FILE}", str(here / STATE_FILE))
        try:
            files = read_state(here)["files"]
        except CheckpointError as error:
            return str(error).removeprefix(f"{here} ").removeprefix("is damaged: ")
        if gone := [name for name in sorted(files) if not self._files.exists(f"{there}/{name}")]:
            return f"{gone[0]} is gone"
        self._files.get([f"{there}/{name}" for name in files], [str(here / name) for name in files])
        return files

    def download_metrics(self, here: Path) -> None:
        """Replace the metrics file `here` by the mirror's copy, if it exists."""
        there, half_copied = f"{self._root}/metrics.jsonl", here.with_suffix(".tmp")
        if self._files.exists(there):
            self._files.get_file(there, str(half_copied))
            half_copied.rename(here)

    def upload(self, checkpoint: Path, step: int, metrics: Path) -> None:
        """Copy a complete checkpoint and the metrics to the mirror, replacing a checkpoint of the same step."""
        self._remove(step)
        there = self._path_of(step)
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != STATE_FILE)
        self._files.put([str(checkpoint / name) for name in names], [f"{there}/{name}" for name in names])
        self._put_file(metrics, f"{self._root}/metrics.jsonl")
        self._put_file(checkpoint / STATE_FILE, f"{there}/{STATE_FILE}")

    def retain(self, newest: int, section: CheckpointSection) -> None:
        """Delete expired checkpoints, and incomplete ones older than `newest`, the step of the checkpoint just
        copied."""
        whole = [step for step in self.complete() if step <= newest]
        half_copied = {step for step in self._steps() if step < newest} - set(whole)
        for step in half_copied.union(section.expired(whole)):
            self._remove(step)

    def url_of(self, step: int) -> str:
        """Return a checkpoint's URL, for messages."""
        return f"{self.url}/checkpoints/{folder_name(step)}"

    def _path_of(self, step: int) -> str:
        return f"{self._root}/checkpoints/{folder_name(step)}"

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints in the mirror, complete or not."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, state.json first, so that a partly deleted checkpoint is incomplete."""
        for path in (f"{self._path_of(step)}/{STATE_FILE}", self._path_of(step)):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _put_file(self, here: Path, there: str) -> None:
        """Copy a file and rename it, so that a partial copy never appears under its final name."""
        self._files.put_file(str(here), f"{there}.tmp")
        self._files.mv(f"{there}.tmp", there)
