"""Safe reader for the `.metadata` pickle of a torch.distributed checkpoint: it accepts only the classes that
tensor metadata needs.

A run folder, or the bucket that `checkpoint.mirror` names, may belong to another user. torch's own reader
unpickles anything. It then opens files by the names in the metadata and unpickles every entry that is not a
tensor.
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
"""Classes that metadata of tensors needs, besides torch's dtypes. `BytesStorageMetadata` is left out, because
torch unpickles the bytes that it describes."""


def read_metadata(checkpoint: Path) -> Metadata:
    """Return a checkpoint's metadata. Raises UnpicklingError if it does not describe tensors in files of its
    own folder. Damage raises pickle's own errors."""
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
