"""What a rank's disk refuses or loses beside training, kept until all ranks can hear of it together."""

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
    """The disks of one run, as this rank knows them."""

    def __init__(self, mesh: Mesh, search: ChecksumScan):
        self._mesh, self._search = mesh, search
        self._refused: str | None = None

    @property
    def pending(self) -> bool:
        """Whether the next `check` raises, for what this rank knows."""
        return self._refused is not None or self._search.problem is not None

    def write(self, path: Path, work: Callable[[], T]) -> T | None:
        """What `work` returns, which writes to `path`; None if the disk refuses."""
        try:
            return work()
        except OSError as error:
            self._refused = self._refused or f"{path} could not be written: {one_line(error)}"
            return None

    def check(self) -> None:
        """A collective of all ranks. Raises, on all of them, for what one has met: DataError for token shards that are not
        what was prepared, TrainingError for what could not be written."""
        if (problem := first_error_of_any_rank(self._search.problem, self._mesh)) is not None:
            raise DataError(problem)
        if (problem := first_error_of_any_rank(self._refused, self._mesh)) is not None:
            raise TrainingError(f"{problem}; start the same command again to continue from the last checkpoint")
