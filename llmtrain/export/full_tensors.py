"""The tensors of a checkpoint, whole, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llmtrain.errors import CheckpointError
from llmtrain.train.checkpoint_reader import CheckpointReader

REMEDY = "copy the checkpoint again, or export another with --step"


class FullTensorReader(CheckpointReader):
    """A checkpoint's tensors by name, for a process that is no rank. Opening it finds missing and shortened files."""

    def __init__(self, path: Path):
        """Raises CheckpointError for a checkpoint that is not whole."""
        super().__init__(path)
        metadata = self._reader.read_metadata()
        self._entries = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        _check_files(path, metadata)

    def shapes(self, prefix: str) -> dict[str, torch.Size]:
        """Shapes of the tensors whose name begins with `prefix`, by the rest of their name."""
        return {
            name.removeprefix(prefix): entry.size for name, entry in self._entries.items() if name.startswith(prefix)
        }

    def read_full_tensor(self, name: str) -> torch.Tensor:
        """One tensor on the CPU. Raises CheckpointError for damaged bytes, or values that are not finite."""
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
    """Every file that the metadata names is there and long enough."""
    needed: dict[str, int] = {}
    for place in metadata.storage_data.values():
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
    for name, size in sorted(needed.items()):
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: no such file, but the checkpoint has weights in it; {REMEDY}")
        if file.stat().st_size < size:
            raise CheckpointError(f"{file}: {file.stat().st_size} bytes found, {size} expected; {REMEDY}")
