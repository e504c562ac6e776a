"""Rules of resharding for two checkpoints of one run, before and after another mesh took it over: whole tensors, plain NumPy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


@dataclass
class Written:
    """Checkpoint as plain arrays, read without any of the trainer's code."""

    tensors: dict[str, np.ndarray]
    state: dict[str, Any]

    def ranks(self, *names: str | int) -> list[Any]:
        """Return one of the plain values of every rank."""
        values = self.state["ranks"]
        for name in names:
            values = [value[name] for value in values]
        return values


def read_checkpoint(path: Path) -> Written:
    """Read whole tensors, in their own precision."""
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return Written(arrays, json.loads((path / "state.json").read_text()))


def newest(folder: Path) -> Path:
    """Return the newest checkpoint in a folder of checkpoints."""
    return folder / (folder / "latest").read_text().strip()


def of_replicas(written: Written) -> list[dict[str, np.ndarray]]:
    """Return each replica's own tensors by name, in float64."""
    return [
        {
            name.removeprefix(f"replica{replica}."): tensor.astype(np.float64)
            for name, tensor in written.tensors.items()
            if name.startswith(f"replica{replica}.")
        }
        for replica in range(written.state["mesh"][0])
    ]


def shared(written: Written) -> dict[str, np.ndarray]:
    return {name: tensor for name, tensor in written.tensors.items() if not name.startswith(("replica", "rank"))}


def assert_follows_the_rules(got: Written, old: Written, rtol: float) -> None:
    """Check the rules on whole tensors: means, shared tensors, and the sum of rounding errors."""
    before, after = of_replicas(old), of_replicas(got)
    for name in before[0]:
        total = sum(replica[name] for replica in before)
        expected = total / (len(after) if name.startswith("sync.error.") else len(before))
        for replica in after:
            np.testing.assert_allclose(replica[name], expected, rtol=rtol, atol=rtol, err_msg=name)
    assert all(replica.keys() == before[0].keys() for replica in after), "no tensor may be dropped"
    assert shared(got).keys() == shared(old).keys()
    for name, tensor in shared(old).items():
        np.testing.assert_array_equal(shared(got)[name], tensor, err_msg=name)
    assert sum(got.ranks("predicted_tokens")) == sum(old.ranks("predicted_tokens"))
    assert sum(got.ranks("traffic", "bytes")) == pytest.approx(sum(old.ranks("traffic", "bytes")), rel=1e-14)
    assert got.state["step"] == old.state["step"]
