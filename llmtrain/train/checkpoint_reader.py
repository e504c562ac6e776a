"""The tensors of a checkpoint as a rank reads them: its own part of each, whatever mesh wrote it, by itself."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.tensor import DTensor

from llmtrain.errors import CheckpointError
from llmtrain.train.metadata import read_metadata


class CheckpointReader:
    """A checkpoint's tensors by name. Ranks read without waiting for one another, each the rows that it needs."""

    def __init__(self, path: Path):
        """Raises CheckpointError if it is damaged, as `read` does."""
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:  # pickle reports damage in many ways
            raise self._damaged(error) from error
        self.names: Collection[str] = self._reader.read_metadata().state_dict_metadata.keys()

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors with those of the given names."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*single process", UserWarning)  # which is what is wanted
                dcp.load(dict(into), storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            raise self._damaged(next(iter(failures))[0]) from error

    def read_mean(self, names: Sequence[str], into: torch.Tensor, factor: float = 1.0) -> None:
        """Fill a tensor with `factor` x the mean of those of the given names, which are read one at a time. Summed in
        float64 and rounded once, so that the mean of equal tensors is what they are, to the last bit.

        Raises CheckpointError where one holds a value that is not finite: a mean would pass it on to all replicas.
        """
        target = _local(into)
        total = torch.zeros_like(target, dtype=torch.float64)
        for name in names:
            one = torch.empty_like(into)
            self.read({name: one})
            if not _local(one).isfinite().all():
                raise CheckpointError(
                    f"{self.path}: {name} holds a value that is not finite, and so would the mean of {len(names)} replicas; "
                    f"continue with {len(names)} replicas, or delete this checkpoint to continue from the one before"
                )
            total += _local(one)
        target.copy_(total.div_(len(names)).mul_(factor))

    def _damaged(self, error: BaseException) -> CheckpointError:
        reason = " ".join(str(error).split())[:200]
        return CheckpointError(f"{self.path} can't be read: {reason}; delete it to continue from the one before")


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once, not once a tensor, and runs nothing that it holds."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = read_metadata(path)
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)  # as torch's own reader does

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
