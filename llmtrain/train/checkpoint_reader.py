"""Checkpoint reader: each rank reads its part of every tensor, without collectives. Any mesh may have written the
checkpoint. Its pickled metadata may contain only known classes."""

from __future__ import annotations

import importlib
import pickle
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

FILE = ".metadata"
METADATA = "torch.distributed.checkpoint.metadata"
CLASSES = {
    (METADATA, "Metadata"),
    (METADATA, "MetadataIndex"),
    (METADATA, "StorageMeta"),
    (METADATA, "TensorStorageMetadata"),
    (METADATA, "TensorProperties"),
    (METADATA, "ChunkStorageMetadata"),
    (METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""Classes that the metadata of tensors needs, in addition to torch's dtypes. `BytesStorageMetadata` is excluded,
because torch unpickles the bytes that it describes."""


def read_metadata(checkpoint: Path) -> Metadata:
    """Return a checkpoint's metadata. Raises UnpicklingError unless it describes tensors in files of its own
    folder. Damaged metadata raises pickle's own errors."""
    with (checkpoint / FILE).open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{FILE} holds a {type(metadata).__name__}, which is no metadata")
    for stored in (metadata.storage_data or {}).values():
        if not is_bare_file_name(stored.relative_path):
            raise pickle.UnpicklingError(f"{FILE} names {stored.relative_path!r}, which is no file of this folder")
    return metadata


def is_bare_file_name(name: str) -> bool:
    """Return whether `name` is a plain file name, which can't lead out of its folder."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to `CLASSES` and torch dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{FILE} asks for {module}.{name}, which describes no tensor")


class CheckpointReader:
    """Reader of a checkpoint's tensors by name. Each rank reads only the rows that it needs, without waiting for other
    ranks."""

    def __init__(self, path: Path):
        """Open the checkpoint. Raises CheckpointError if it is damaged, as does `read`."""
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:  # pickle raises many kinds of errors for damage
            raise self._damaged(error) from error
        self.names: Collection[str] = self._reader.read_metadata().state_dict_metadata.keys()

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill each tensor with the stored tensor of the same name."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*single process", UserWarning)  # which is intended
                dcp.load(dict(into), storage_reader=self._reader, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            failures = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            raise self._damaged(next(iter(failures))[0]) from error

    def read_mean(self, names: Sequence[str], into: torch.Tensor, factor: float = 1.0) -> None:
        """Fill `into` with `factor` x the mean of the stored tensors, which are read one at a time. The sum is
        in float64 and rounded once, so that the mean of equal tensors equals them bit for bit.

        Raises CheckpointError if a tensor contains a non-finite value, because the mean would pass it on to all
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
