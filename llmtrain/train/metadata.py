"""Reading the `.metadata` of a torch.distributed checkpoint, which is a pickle, without running what it asks for.

A run folder, or the bucket that `checkpoint.mirror` names, may be somebody else's. torch's own reader unpickles anything,
and then opens files by the names that it found, and unpickles what is not a tensor.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

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
"""Classes that metadata of tensors needs, beside torch's dtypes. `BytesStorageMetadata` is left out: torch unpickles the bytes
that it describes."""


def read_metadata(checkpoint: Path) -> Metadata:
    """Return a checkpoint's metadata. Raises UnpicklingError for what does not describe tensors in files of its folder, and
    what pickle raises for damage."""
    with (checkpoint / FILE).open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{FILE} holds a {type(metadata).__name__}, which is no metadata")
    for stored in (metadata.storage_data or {}).values():
        if not is_bare_file_name(stored.relative_path):
            raise pickle.UnpicklingError(f"{FILE} names {stored.relative_path!r}, which is no file of this folder")
    return metadata


def is_bare_file_name(name: str) -> bool:
    """Return whether this is a file's name alone, which leads out of no folder."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows CLASSES and dtypes only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{FILE} asks for {module}.{name}, which describes no tensor")
