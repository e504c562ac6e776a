"""Reader for a checkpoint's full tensors, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llmtrain.errors import CheckpointError
from llmtrain.train.checkpoint_reader import CheckpointReader

REMEDY = "copy the checkpoint again, or export another with --step"


class FullTensorReader(CheckpointReader):
    """Reader of a checkpoint's full tensors by name, for a process that is not a rank."""

    def __init__(self, path: Path):
        """Open a checkpoint. Raises CheckpointError if its metadata is damaged, or a file is missing or truncated."""
        super().__init__(path)
        metadata = self._reader.read_metadata()
        self._entries = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        _check_files(path, metadata)

    def shapes(self, prefix: str) -> dict[str, torch.Size]:
        """Return the shapes of the tensors whose names begin with `prefix`, by the rest of their names."""
        return {
            name.removeprefix(prefix): entry.size for name, entry in self._entries.items() if name.startswith(prefix)
        }

    def read_full_tensor(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU. Raises CheckpointError if it cannot be read or has non-finite values."""
        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.read({name: tensor})
        if not tensor.isfinite().all():
            raise CheckpointError(f"{self.path}: {name} holds a value that is not finite; export another with --step")
        return tensor

    def _damaged(self, error: BaseException) -> CheckpointError:
        reason = " ".join(str(error).split())[:200]
        return CheckpointError(f"{self.path} can't be read: {reason}; {REMEDY}")


def _check_files(path: Path, metadata: Metadata) -> None:
    """Raise CheckpointError unless every file that the metadata names exists and is long enough."""
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file, but the checkpoint has weights in it; {REMEDY}")
        if file.stat().st_size < size:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes found, {size} expected; {REMEDY}")
