"""I/O errors recorded on one rank and raised on all ranks at the next agreed step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from llmtrain.data.verify import ChecksumScan
from llmtrain.errors import DataError, TrainingError
from llmtrain.parallel.mesh import Mesh
from llmtrain.train.checkpoint_writer import one_line
from llmtrain.train.integrity import first_error_of_any_rank

T = TypeVar("T")


class IoErrors:
    """I/O errors of one run on this rank: failed writes and damaged token shards."""

    def __init__(self, mesh: Mesh, search: ChecksumScan):
        self._mesh, self._search = mesh, search
        self._refused: str | None = None

    @property
    def pending(self) -> bool:
        """Return whether the next `check` raises because of an error on this rank."""
        return self._refused is not None or self._search.problem is not None

    def write(self, path: Path, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, which writes to `path`. On an OSError, record it and return None."""
        try:
            return work()
        except OSError as error:
            self._refused = self._refused or f"{path} could not be written: {one_line(error)}"
            return None

    def check(self) -> None:
        """Raise on all ranks if any rank has recorded an error: DataError for damaged token shards,
        TrainingError for failed writes. A collective of all ranks."""
        if (problem := first_error_of_any_rank(self._search.problem, self._mesh)) is not None:
            raise DataError(problem)
        if (problem := first_error_of_any_rank(self._refused, self._mesh)) is not None:
            raise TrainingError(f"{problem}; start the same command again to continue from the last checkpoint")
