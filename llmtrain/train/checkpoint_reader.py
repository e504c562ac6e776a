"""Checkpoint reader: each rank reads its own part of every tensor, written on any mesh, without collectives."""

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
    """A checkpoint's tensors by name. Each rank reads only the rows that it needs, without waiting for other
    ranks."""

    def __init__(self, path: Path):
        """Open the checkpoint. Raises CheckpointError if it is damaged, as does `read`."""
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:  # pickle reports damage in many ways
            raise self._damaged(error) from error
        self.names: Collection[str] = self._reader.read_metadata().state_dict_metadata.keys()

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill each tensor with the stored tensor of the same name."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*single process", UserWarning)  # which is what is wanted
                dcp.load(dict(into), storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            raise self._damaged(next(iter(failures))[0]) from error

    def read_mean(self, names: Sequence[str], into: torch.Tensor, factor: float = 1.0) -> None:
        """Fill `into` with `factor` x the mean of the stored tensors, which are read one at a time. The sum is
        in float64 and rounded once, so that the mean of equal tensors equals them bit for bit.

        Raises CheckpointError if a tensor holds a non-finite value, because the mean would pass it on to all
        replicas.
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
    """Reader that loads the metadata once instead of once per tensor, with the restricted `read_metadata`."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = read_metadata(path)
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)  # as torch's own reader does

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows, which share memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
