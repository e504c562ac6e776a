"""Reader of the tensors in a checkpoint's files: a rank's rows of them, full tensors, and means.

torch pickles the metadata, which lists the tensors and their positions in the files. Unpickling can run any code, so only known
classes are accepted in the metadata.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from llmtrain.errors import CheckpointError, one_line
from llmtrain.files import is_bare_file_name
from llmtrain.parallel.sharded import local
from llmtrain.train.checkpoint_files import raise_if_transient

PART = 1 << 22
"""Number of elements that are added per operation. It limits the memory for torch's fp64 copy of the added elements."""
METADATA_FILE = ".metadata"
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
"""Classes and functions, as (module, name), that pickled metadata of tensors needs, in addition to torch's dtypes.
`BytesStorageMetadata` is not among them, because torch unpickles the bytes that it describes."""


class CheckpointReader:
    """Reader of a checkpoint's tensors by name. Each rank reads only the rows that it needs, without any collective."""

    remedy = "delete it to continue from the previous one"
    """Advice to a user whose checkpoint is damaged."""

    def __init__(self, path: Path):
        """Open the checkpoint. Raises CheckpointError if its metadata is damaged."""
        self.path = path
        try:
            self._reader = _Reader(path)
        except Exception as error:  # pickle raises many kinds of errors for damage
            self._raise(error)
        self.tensors = self._reader.metadata.state_dict_metadata
        """Shape and dtype of each tensor, by name."""

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Fill each tensor in place with the stored tensor of the same name. A DTensor receives this rank's rows. Raises
        CheckpointError if one can't be read."""
        try:
            dcp.load(dict(into), storage_reader=self._reader, no_dist=True)
        except CheckpointException as error:  # a BaseException
            self._raise(next(iter(error.failures.values()))[0])
        except Exception as error:
            self._raise(error)

    def read_mean(self, names: Sequence[str], into: torch.Tensor, factor: float = 1.0) -> None:
        """Fill `into` with `factor` x the mean of the stored tensors, which are read one at a time.

        Raises CheckpointError if a tensor contains a non-finite value, because the mean would pass it on to all
        replicas.
        """
        replicas = f"{len(names)} replicas"
        remedy = (
            f", and so would the mean of {replicas}; continue with {replicas}, or delete this checkpoint to continue from the "
            "previous one"
        )
        stored = (local(self._read_finite(name, torch.empty_like(into), remedy)) for name in names)
        local(into).copy_(mean_of(stored).mul_(factor))

    def _read_finite(self, name: str, into: torch.Tensor, remedy: str) -> torch.Tensor:
        """Fill and return `into`. Raises CheckpointError, which ends with `remedy`, if it has a value that is not finite."""
        self.read({name: into})
        if not local(into).isfinite().all():
            raise CheckpointError(f"{self.path}: {name} holds a value that is not finite{remedy}")
        return into

    def _raise(self, error: BaseException) -> NoReturn:
        if isinstance(error, OSError):
            raise_if_transient(self.path, error)
        raise CheckpointError(f"{self.path} can't be read: {one_line(error)}; {self.remedy}") from error


class FullTensorReader(CheckpointReader):
    """Reader of a checkpoint's full tensors by name, for a process that is not a rank."""

    def __init__(self, path: Path, remedy: str, other: str):
        """Open a checkpoint. `remedy` and `other` end error messages: advice for a damaged checkpoint, and how to choose
        another one. Raises CheckpointError if the metadata is damaged."""
        self.remedy, self.other = remedy, other
        super().__init__(path)

    def shapes(self, prefix: str) -> dict[str, torch.Size]:
        """Return the shapes of the tensors whose names begin with `prefix`, keyed by the rest of the name."""
        return {
            name.removeprefix(prefix): entry.size for name, entry in self.tensors.items() if name.startswith(prefix)
        }

    def read_full_tensor(self, name: str) -> torch.Tensor:
        """Return one full tensor on the CPU. Raises CheckpointError if it can't be read or has values that are not finite."""
        entry = self.tensors[name]
        return self._read_finite(name, torch.empty(entry.size, dtype=entry.properties.dtype), f"; {self.other}")


def mean_of(tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return the mean of tensors in fp64. The tensors are requested one at a time. Rounded once, the mean of equal
    tensors is bit-identical to each of them."""
    total, count = next(tensors).double().contiguous(), 1
    for tensor in tensors:
        for sum_of_part, part in zip(total.view(-1).split(PART), tensor.reshape(-1).split(PART), strict=True):
            sum_of_part += part
        count += 1
    return total.div_(count)


class _Reader(dcp.FileSystemReader):
    """Torch's reader, changed to load the metadata only once, and with the restricted `read_metadata`."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.metadata = read_metadata(path)
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)  # as torch's own reader does

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def read_metadata(checkpoint: Path) -> Metadata:
    """Return a checkpoint's metadata. Raises UnpicklingError unless it describes only tensors in files of the checkpoint's own
    folder. Damaged metadata raises one of pickle's many errors."""
    with (checkpoint / METADATA_FILE).open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{METADATA_FILE} holds a {type(metadata).__name__}, which is not metadata")
    for stored in (metadata.storage_data or {}).values():
        if not is_bare_file_name(stored.relative_path):
            raise pickle.UnpicklingError(
                f"{METADATA_FILE} names {stored.relative_path!r}, which is not a file in this folder"
            )
    return metadata


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to `CLASSES` and torch dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{METADATA_FILE} asks for {module}.{name}, which does not describe a tensor")
