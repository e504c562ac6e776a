"""Checkpoints: the complete state of a run, written under a temporary name and renamed when it is whole.

    checkpoints/step-00001000/   torch.distributed.checkpoint files and state.json
    checkpoints/latest           the newest one's name, written last

Tensors that replicas have for themselves (weights, optimizer moments, rounding errors) are stored under `replica<r>.`,
what they share (anchor, outer momentum, means under way) once. Another mesh may load them: see `reshape`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from llmtrain.errors import CheckpointError
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.seeding import derive_seed
from llmtrain.sync.anchors import flatten
from llmtrain.sync.method import Method
from llmtrain.sync.schedules.schedule import ByBlock
from llmtrain.train.reshape import Reshape
from llmtrain.train.stored import StoredTensors

FORMAT = 2
NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint says beside the tensors."""

    step: int
    progress: dict[str, Any]
    """This rank's plain values, as `Checkpoints.save` was given them."""
    how: str
    """What was done to them for this mesh, for the console; empty for nothing."""


class Checkpoints:
    """The checkpoints of one run directory, seen by all ranks."""

    def __init__(self, directory: Path, mesh: Mesh, engine: Engine, method: Method, keep: int, keep_every: int | None):
        self.directory, self.mesh, self.engine, self.method = directory, mesh, engine, method
        self.keep, self.keep_every = keep, keep_every

    def save(self, step: int, progress: dict[str, Any]) -> Path:
        """Write the state after `step`; `progress` is this rank's part that is plain values. A collective of all ranks."""
        final = self.directory / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        if self.mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._barrier()
        shared, own = self.method.shared_tensors(), self.method.own_tensors()
        tensors = self._tensors(shared, own)
        tensors |= {f"rank{self.mesh.world.rank}.{name}": state for name, state in self._generators().items()}
        dcp.save(
            tensors, checkpoint_id=temporary, process_group=self.mesh.everyone.group, no_dist=self.mesh.world.size == 1
        )
        ranks = self._gather({"method": self.method.state_dict(), **progress})
        if self.mesh.is_main:
            state = {"format": FORMAT, "step": step, "mesh": [self.mesh.replicas, self.mesh.shard.size]}
            state |= {"shared": _blocks_there(shared), "own": _blocks_there(own), "ranks": ranks}
            _write_durably(temporary / "state.json", json.dumps(state))
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            _write_durably(self.directory / "latest", final.name + "\n")
            self._retain(step)
        self._barrier()
        return final

    def load(self, path: Path, global_batch: int, seed: int) -> Loaded:
        """Put the state in `path` back, whatever mesh wrote it. A collective of all ranks.

        `global_batch` is the run's; random numbers of ranks that are new derive from `seed`. Raises CheckpointError, on
        every rank, for a checkpoint that is damaged or can't be continued on this mesh.
        """
        state = read_state(path)
        reshape = Reshape.onto(self.mesh, state["mesh"])
        progress = reshape.progress(state["ranks"], state["step"], global_batch, self.method)
        method = progress.pop("method")
        shared, own = self._empty(state["shared"]), self._empty(state["own"])
        tensors = self._tensors(shared, own)
        generators = self._seeded_generators(seed, state["step"])
        self._together(lambda: self._read(path, reshape, tensors, generators))
        shared, own = self._loaded(shared, own, tensors)
        prefix = f"replica{self.mesh.replica.rank}."
        of_engine = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        self.engine.load_state_dict({k: v for k, v in of_engine.items() if not k.startswith("sync.")})
        self._set_generators(generators)
        self.method.load_state_dict(method, {**shared, **own})
        return Loaded(state["step"], progress, reshape.describe())

    def _read(
        self, path: Path, reshape: Reshape, tensors: dict[str, torch.Tensor], generators: dict[str, torch.Tensor]
    ) -> None:
        """Fill the tensors. No collective."""
        stored = StoredTensors(path)
        own = f"replica{self.mesh.replica.rank}."
        if reshape.mixes:
            for name, tensor in tensors.items():
                if name.startswith(own):
                    rest = name.removeprefix(own)
                    kind = rest.removeprefix("sync.").split(".")[0]
                    names = [f"replica{replica}.{rest}" for replica in reshape.sources]
                    stored.read_mean(names, tensor, reshape.factor(kind))
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(own)}
        there = {f"rank{reshape.same_rank}.{name}": state for name, state in generators.items()}
        stored.read(tensors | {name: state for name, state in there.items() if name in stored.names})

    def _together(self, read: Callable[[], None]) -> None:
        """Do what each rank does by itself; a CheckpointError of one is raised on all."""
        error = None
        try:
            read()
        except CheckpointError as caught:
            error = caught
        errors: list[CheckpointError | None] = [error]
        if self.mesh.world.size > 1:
            errors = [None] * self.mesh.world.size
            dist.all_gather_object(errors, error, group=self.mesh.everyone.group)
        for error in errors:
            if error is not None:
                raise error

    def _empty(self, there: dict[str, list[bool]]) -> dict[str, ByBlock]:
        """Room for the method's tensors that a checkpoint has."""
        blocks = self.engine.blocks
        return {
            kind: [torch.empty_like(flatten(blocks[i])) if is_there else None for i, is_there in enumerate(present)]
            for kind, present in there.items()
        }

    def _tensors(self, shared: dict[str, ByBlock], own: dict[str, ByBlock]) -> dict[str, torch.Tensor]:
        replica = self.mesh.replica.rank
        tensors = {f"replica{replica}.{name}": tensor for name, tensor in self.engine.state_dict().items()}
        for prefix, kind, flats in self._kinds(shared, own):
            for block, flat in zip(self.engine.blocks, flats, strict=False):
                if flat is not None:
                    named = self.engine.as_sharded(block, flat)
                    tensors |= {f"{prefix}{kind}.{name}": tensor for name, tensor in named.items()}
        return tensors

    def _generators(self) -> dict[str, torch.Tensor]:
        """States of this rank's random number generators."""
        states = {"rng": torch.get_rng_state()}
        if self.mesh.device.type == "cuda":
            states["cuda_rng"] = torch.cuda.get_rng_state(self.mesh.device)
        return states

    def _seeded_generators(self, seed: int, step: int) -> dict[str, torch.Tensor]:
        """What a rank begins with that was not there before `step`."""
        torch.manual_seed(derive_seed(seed, "rank", self.mesh.replica.rank, self.mesh.shard.rank, "since", step))
        return self._generators()

    def _set_generators(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["rng"])
        if "cuda_rng" in states:
            torch.cuda.set_rng_state(states["cuda_rng"], self.mesh.device)

    def _loaded(
        self, shared: dict[str, ByBlock], own: dict[str, ByBlock], tensors: dict[str, torch.Tensor]
    ) -> tuple[dict[str, ByBlock], dict[str, ByBlock]]:
        """The method's tensors as the engine lays them out, from those that `_tensors` made of them."""
        loaded: dict[str, dict[str, ByBlock]] = {"": {}, self._own_prefix: {}}
        for prefix, kind, flats in self._kinds(shared, own):
            loaded[prefix][kind] = [
                None
                if flat is None
                else self.engine.from_sharded(
                    block, {name: tensors[f"{prefix}{kind}.{name}"] for name in block.parameter_names}
                )
                for block, flat in zip(self.engine.blocks, flats, strict=False)
            ]
        return loaded[""], loaded[self._own_prefix]

    @property
    def _own_prefix(self) -> str:
        return f"replica{self.mesh.replica.rank}.sync."

    def _kinds(self, shared: dict[str, ByBlock], own: dict[str, ByBlock]) -> Iterator[tuple[str, str, ByBlock]]:
        """(prefix in the checkpoint, kind, tensors by block) of all the method's tensors."""
        for prefix, kinds in (("", shared), (self._own_prefix, own)):
            yield from ((prefix, kind, flats) for kind, flats in kinds.items())

    def _retain(self, newest: int) -> None:
        """Delete what is neither among the newest nor kept for good; runs after the new one is complete."""
        steps = sorted(step for step, _ in complete(self.directory) if step <= newest)
        for step in steps[: -self.keep]:
            if self.keep_every is None or step % self.keep_every:
                shutil.rmtree(self.directory / f"step-{step:08d}", ignore_errors=True)

    def _gather(self, value: dict[str, Any]) -> list[dict[str, Any]] | None:
        if self.mesh.world.size == 1:
            return [value]
        values = [None] * self.mesh.world.size if self.mesh.is_main else None
        dist.gather_object(value, values, group=self.mesh.everyone.group)
        return values

    def _barrier(self) -> None:
        self.mesh.everyone.all_reduce(torch.zeros(1), "meeting around a checkpoint").wait()


def _blocks_there(kinds: dict[str, ByBlock]) -> dict[str, list[bool]]:
    return {kind: [flat is not None for flat in flats] for kind, flats in kinds.items()}


def complete(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of all complete checkpoints in a `checkpoints` folder, oldest first."""
    if not directory.is_dir():
        return []
    named = ((NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in named if match and (path / "state.json").exists())


def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises CheckpointError if it is damaged or of another format."""
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}/state.json can't be read ({error}); delete {path} to continue from the one before"
        ) from error
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {state.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    return state


def _write_durably(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
