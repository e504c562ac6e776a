"""Reader of the safetensors files in a transformers folder: shapes from their headers, and one tensor at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from llmtrain.errors import ModelError, one_line
from llmtrain.pretrained import CONFIG, KEY, weight_files

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights that can be trained, by their names in safetensors."""


class SafetensorsReader:
    """Reader of the weights in a transformers folder, by their names in its files."""

    def __init__(self, folder: Path):
        """Read the headers. Raises ModelError, in one line, for a folder without complete safetensors files."""
        self.folder, self.weight_files = folder, weight_files(folder)
        self.shapes: dict[str, torch.Size] = {}
        self._files = {}
        for name in self.weight_files:
            try:
                opened = safe_open(folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise self._unreadable(name, error) from None
            for key in opened.keys():  # noqa: SIM118  not a mapping
                part = opened.get_slice(key)
                if part.get_dtype() not in FLOATS:
                    raise ModelError(
                        f"{KEY}: {folder / name}: {key} has type {part.get_dtype()}, expected one of {', '.join(FLOATS)}; "
                        "give weights that are not quantized"
                    )
                self.shapes[key], self._files[key] = torch.Size(part.get_shape()), (name, opened)

    @property
    def files(self) -> list[str]:
        """Return the names of the files that determine the model: its config and its weights."""
        return [CONFIG, *self.weight_files]

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor in fp32 on the CPU. Raises ModelError if it has a value that is not finite."""
        file, opened = self._files[name]
        try:
            tensor = opened.get_tensor(name).float()
        except (SafetensorError, OSError) as error:
            raise self._unreadable(file, error) from None
        if not tensor.isfinite().all():
            raise ModelError(
                f"{KEY}: {self.folder / file}: {name} holds a value that is not finite; give other weights"
            )
        return tensor

    def _unreadable(self, name: str, error: Exception) -> ModelError:
        return ModelError(f"{KEY}: {self.folder / name} is damaged or cut short ({one_line(error)}); copy it again")
