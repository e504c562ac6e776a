"""Weights of the exported model: the replicas' mean, the anchor, or one replica's parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from llmtrain.errors import CheckpointError, UserError
from llmtrain.model import LanguageModel
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
        """Return the shapes of the tensors whose names begin with `prefix`, keyed by the rest of the name."""
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


PREFIX = "causal_lm."
"""Prefix of transformers' parameter names in llmtrain checkpoints."""
PART = 1 << 22
"""Elements added per operation. Limits memory, because torch makes an fp64 copy of the elements that it adds."""


@dataclass(frozen=True)
class WeightSource:
    """Choice of weights: `mean`, `anchor`, or `replica` with its number."""

    kind: str
    replica: int | None = None

    @classmethod
    def parse(cls, text: str) -> WeightSource:
        """Parse `mean`, `anchor` or `replica:K`. Raises UserError for anything else."""
        if text in ("mean", "anchor"):
            return cls(text)
        if match := re.fullmatch(r"replica:(\d+)", text):
            return cls("replica", int(match[1]))
        raise UserError(f"--weights is {text!r}; expected mean, anchor, or replica:K such as replica:0")

    def __str__(self) -> str:
        return self.kind if self.replica is None else f"{self.kind}:{self.replica}"

    def describe(self, replicas: int) -> str:
        """Return the choice in words, for a run with `replicas` replicas."""
        if self.kind == "anchor":
            return "the anchor (the last synchronization's result)"
        if self.kind == "replica":
            return f"replica {self.replica} of {replicas}, alone"
        return f"the mean of {replicas} replicas" if replicas > 1 else "the one replica's"


MEAN = WeightSource("mean")


class ChosenWeights:
    """Weights of the exported model by transformers' names, read one at a time in fp32."""

    def __init__(self, stored: FullTensorReader, state: dict[str, Any], choice: WeightSource):
        """Open the weights; `state` is the checkpoint's state.json.

        Raises UserError if the checkpoint has no such weights.
        """
        self._stored, self._choice = stored, choice
        self.replicas = state["mesh"][0]
        if choice.kind == "anchor" and not state["shared"]["anchor"]:
            raise UserError(
                f"--weights anchor: {stored.path} has no anchor (the method keeps none, or no round has begun); use mean"
            )
        if choice.replica is not None and choice.replica >= self.replicas:
            there = "replica:0" if self.replicas == 1 else f"replica:0 to replica:{self.replicas - 1}"
            raise UserError(f"--weights {choice}: {stored.path} has {there}")
        self.shapes = {name.removeprefix(PREFIX): shape for name, shape in stored.shapes(self._prefixes[0]).items()}

    def read(self, name: str) -> torch.Tensor:
        """Return one full weight in fp32.

        The mean is summed in fp64 and rounded once, so that the mean of equal replicas is bit-identical to each of
        them.
        """
        first, *others = (f"{prefix}{PREFIX}{name}" for prefix in self._prefixes)
        if not others:
            return self._stored.read_full_tensor(first).float()
        total = self._stored.read_full_tensor(first).double()
        for other in others:
            parts = self._stored.read_full_tensor(other).view(-1).split(PART)
            for sum_of_part, part in zip(total.view(-1).split(PART), parts, strict=True):
                sum_of_part += part
        return total.div_(1 + len(others)).float()

    def check_model(self, model: LanguageModel) -> None:
        """Raise CheckpointError unless the names and shapes of the weights are those of `model`."""
        expected = {name.removeprefix(PREFIX): p.shape for name, p in model.named_parameters()}
        for name in sorted(expected.keys() | self.shapes.keys()):
            there, here = (list(shapes[name]) if name in shapes else "none" for shapes in (self.shapes, expected))
            if there != here:
                raise CheckpointError(
                    f"{self._stored.path} is of another model than the run's recipe.yaml: {name} is {there} there, "
                    f"{here} by the recipe; put back the recipe.yaml that it was trained with"
                )

    @property
    def _prefixes(self) -> list[str]:
        if self._choice.kind == "anchor":
            return ["anchor."]
        replicas = range(self.replicas) if self._choice.replica is None else [self._choice.replica]
        return [f"replica{replica}.weights." for replica in replicas]
