"""Metadata of a checkpoint's tensors: which there are, and where in the files.

torch pickles it, and unpickling can run any code, so it may contain known classes only.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from llmtrain.files import is_bare_file_name

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


def read_metadata(checkpoint: Path) -> Metadata:
    """Return a checkpoint's metadata. Raises UnpicklingError unless it describes only tensors in files of the checkpoint's own
    folder. Damaged metadata raises one of pickle's many errors."""
    with (checkpoint / METADATA_FILE).open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{METADATA_FILE} holds a {type(metadata).__name__}, which is no metadata")
    for stored in (metadata.storage_data or {}).values():
        if not is_bare_file_name(stored.relative_path):
            raise pickle.UnpicklingError(
                f"{METADATA_FILE} names {stored.relative_path!r}, which is no file of this folder"
            )
    return metadata


class _Unpickler(pickle.Unpickler):
    """Unpickler restricted to `CLASSES` and torch dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{METADATA_FILE} asks for {module}.{name}, which describes no tensor")
