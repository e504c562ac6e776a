"""The files of a run's mirror, at any URL that fsspec knows.

    URL/recipe.yaml                   whose checkpoints they are
        metrics.jsonl                 as it was at the newest of them
        checkpoints/step-00001000/    as in the run directory; state.json comes last

A file system's own errors come through: each has its own.
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
"""Protocols of the file system whose folders have to be made."""


class RemoteRun:
    """A run at a URL. Nothing is there yet, or what was copied before."""

    def __init__(self, url: str):
        """Raises ImportError for a protocol whose package is not installed, ValueError for one that fsspec does not know."""
        from fsspec.core import split_protocol, url_to_fs

        self.url = url
        options = {"auto_mkdir": True} if split_protocol(url)[0] in LOCAL else {}
        self._files: AbstractFileSystem
        self._files, self._root = url_to_fs(url, **options)

    def check_owner(self, recipe: Recipe) -> None:
        """Write the recipe there. Raises RecipeError where another one is."""
        there = f"{self._root}/recipe.yaml"
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder) / "recipe.yaml"
            if self._files.exists(there):
                self._files.get_file(there, str(here))
                check_same_recipe(load_recipe(here), recipe, self.url)
            here.write_text(resolved_yaml(recipe))
            self._put_file(here, there)

    def complete(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return [step for step in self._steps() if self._files.exists(f"{self._path_of(step)}/{STATE_FILE}")]

    def download(self, step: int, here: Path) -> dict[str, Digest] | str:
        """A checkpoint, into an empty folder. Returns its files as state.json lists them, or what is wrong with it."""
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
        """Those that were copied last, in the place of the file that is here; nothing if none were."""
        there, half_copied = f"{self._root}/metrics.jsonl", here.with_suffix(".tmp")
        if self._files.exists(there):
            self._files.get_file(there, str(half_copied))
            half_copied.rename(here)

    def upload(self, checkpoint: Path, step: int, metrics: Path) -> None:
        """A complete checkpoint, in the place of one of the same step."""
        self._remove(step)
        there = self._path_of(step)
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != STATE_FILE)
        self._files.put([str(checkpoint / name) for name in names], [f"{there}/{name}" for name in names])
        self._put_file(metrics, f"{self._root}/metrics.jsonl")
        self._put_file(checkpoint / STATE_FILE, f"{there}/{STATE_FILE}")

    def retain(self, newest: int, section: CheckpointSection) -> None:
        """Delete what need not stay now that the one of step `newest` is there, and what was only half copied before it."""
        whole = [step for step in self.complete() if step <= newest]
        half_copied = {step for step in self._steps() if step < newest} - set(whole)
        for step in half_copied.union(section.expired(whole)):
            self._remove(step)

    def url_of(self, step: int) -> str:
        """Of a checkpoint, for messages."""
        return f"{self.url}/checkpoints/{folder_name(step)}"

    def _path_of(self, step: int) -> str:
        return f"{self._root}/checkpoints/{folder_name(step)}"

    def _steps(self) -> list[int]:
        """Of all checkpoints there, whole or not."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(f"{self._root}/checkpoints", detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(int(match[1]) for match in map(NAME.fullmatch, names) if match)

    def _remove(self, step: int) -> None:
        """state.json first: what is left half deleted is not complete."""
        for path in (f"{self._path_of(step)}/{STATE_FILE}", self._path_of(step)):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def _put_file(self, here: Path, there: str) -> None:
        """A file that must never be there half copied."""
        self._files.put_file(str(here), f"{there}.tmp")
        self._files.mv(f"{there}.tmp", there)
