"""Local files of a text: the values that identify them, and the files that remain for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from llmtrain.config import DataSection
from llmtrain.errors import DataError


def without_held_out(files: Sequence[Path], held_out: Sequence[Path], data: DataSection) -> list[Path]:
    """Return the files of `data.source` that are not of `data.validation`. Raises DataError if there are none."""
    validated = {path.resolve() for path in held_out}
    if not (kept := [path for path in files if path.resolve() not in validated]):
        raise DataError(
            f"data.validation: {data.validation} has all files of data.source={data.source}, so none is left to train on; give "
            "another text, or leave it out to hold out data.validation_fraction of the documents"
        )
    return kept


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return the absolute path, the size in bytes and the modification time in nanoseconds of each file."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
