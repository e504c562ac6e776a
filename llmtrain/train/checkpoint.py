"""Checkpoints: the complete state of a run, written beside training under a temporary name and renamed when it is whole.

    checkpoints/step-00001000/   torch.distributed.checkpoint files and state.json
    checkpoints/latest           the newest one's name, written last

Tensors that replicas have for themselves (weights, optimizer moments, rounding errors) are stored under `replica<r>.`,
what they share (anchor, outer momentum, means under way) once. Another mesh may load them: see `reshape`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from llmtrain.config import CheckpointSection, Recipe
from llmtrain.errors import CheckpointError
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.mesh import Mesh
from llmtrain.seeding import derive_seed
from llmtrain.sync.anchors import flatten
from llmtrain.sync.method import Method
from llmtrain.sync.schedules.schedule import ByBlock
from llmtrain.train.integrity import FORMAT, complete, folder_name, read_state
from llmtrain.train.reshape import Reshape
from llmtrain.train.rundir import refuse_another_recipe
from llmtrain.train.stored import StoredTensors
from llmtrain.train.writing import Writing

T = TypeVar("T")
Keep = Callable[[torch.Tensor], torch.Tensor]
"""What becomes of a tensor of the state on its way to the disk: itself, or a copy that training leaves alone."""


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

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        engine: Engine,
        method: Method,
        section: CheckpointSection,
        timeout_seconds: float,
        in_use: Callable[[], Collection[int]] = tuple,
        recipe: Recipe | None = None,
    ):
        """`in_use`: steps of checkpoints that somebody reads, and that stay until the next one is complete. `recipe`: the
        run's, which goes into each checkpoint; one of another recipe is not loaded."""
        self.directory, self.mesh, self.engine, self.method = directory, mesh, engine, method
        self.section, self.timeout_seconds, self.in_use, self.recipe = section, timeout_seconds, in_use, recipe
        self.seconds = 0.0
        """How long training has stood still for checkpoints."""
        self._writing: Writing | None = None

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Begin to write the state after `step`; `progress` is this rank's part that is plain values. All ranks call it at
        the same step. It returns when the state has been copied to memory that training leaves alone (unless
        `checkpoint.background` is off).

        Raises TrainingError if the checkpoint before was not written.
        """
        self.wait()
        started = time.monotonic()
        shared, own = self.method.shared_tensors(), self.method.own_tensors()
        keep = _copied_to_cpu if self.section.background else _as_it_is
        tensors = self._of_engine(keep)
        for prefix, kind, flats in self._kinds(shared, own):
            # What rests on the CPU passes the device a block at a time; kept there, all of it would be there at once.
            rest = any(flat is not None and flat.device != self.mesh.device for flat in flats)
            tensors |= self._of_method(prefix, kind, flats, _copied_to_cpu if rest else keep)
        tensors |= {f"rank{self.mesh.world.rank}.{name}": keep(state) for name, state in self._generators().items()}
        state = {"format": FORMAT, "step": step, "mesh": [self.mesh.replicas, self.mesh.shard.size]}
        state |= {"shared": _blocks_there(shared), "own": _blocks_there(own)}
        if self.recipe is not None:
            state["recipe"] = self.recipe.model_dump(mode="json")
        final, comms = self.directory / folder_name(step), self.mesh.background
        mine = {"method": self.method.state_dict(), **progress}
        self._writing = Writing(final, tensors, state, mine, comms, lambda: self._retain(step))
        self._writing.start(in_thread=self.section.background)
        self.seconds += time.monotonic() - started

    def wait(self) -> None:
        """Until what `save` began is on the disk. Raises TrainingError if it does not come there in time."""
        started = time.monotonic()
        if self._writing is not None:
            self._writing.wait(self.timeout_seconds)
        self.seconds += time.monotonic() - started

    def written(self) -> Writing | None:
        """What `save` began, once, when it is done well."""
        writing = self._writing
        if writing is None or not writing.is_done or writing.error is not None:
            return None
        self._writing = None
        return writing

    @property
    def failed(self) -> bool:
        """Whether what `save` began could not be written; the next `save` or `wait` says why."""
        return self._writing is not None and self._writing.is_done and self._writing.error is not None

    def load(self, path: Path, global_batch: int, seed: int) -> Loaded:
        """Put the state in `path` back, whatever mesh wrote it. A collective of all ranks.

        `global_batch` is the run's; random numbers of ranks that are new derive from `seed`. Raises CheckpointError, on
        every rank, for a checkpoint that is damaged or can't be continued on this mesh, RecipeError for one of another recipe.
        """
        state = read_state(path)
        if self.recipe is not None and "recipe" in state:
            # It may have been copied into the folder of a run of another name.
            refuse_another_recipe(Recipe.model_validate(state["recipe"]), self.recipe, str(path), ignored=["run.name"])
        reshape = Reshape.onto(self.mesh, state["mesh"])
        progress = reshape.progress(state["ranks"], state["step"], global_batch, self.method)
        method = progress.pop("method")
        generators = self._seeded_generators(seed, state["step"])
        self._read_engine(path, reshape, generators)
        self._set_generators(generators)
        of_method = {
            kind: self._read_kind(path, reshape, prefix, kind, present)
            for prefix, kind, present in self._kinds(state["shared"], state["own"])
        }
        self.method.load_state_dict(method, of_method)
        return Loaded(state["step"], progress, reshape.describe())

    def _read_engine(self, path: Path, reshape: Reshape, generators: dict[str, torch.Tensor]) -> None:
        """Weights, moments and generators; what is read into is gone after it, under ZeRO a second copy of them all."""
        tensors = self._of_engine(_as_it_is)
        self._together(lambda: self._read(path, reshape, tensors, generators))
        prefix = f"replica{self.mesh.replica.rank}."
        self.engine.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})

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
        for met in self.mesh.everyone.all_gather_object(error, "asking all ranks whether they read the checkpoint"):
            if met is not None:
                raise met

    def _read_kind(self, path: Path, reshape: Reshape, prefix: str, kind: str, present: list[bool]) -> ByBlock:
        """One kind of the method's tensors, on the CPU: of those that rest there, one kind at a time is on the device."""
        blocks = [(block, there) for block, there in zip(self.engine.blocks, present, strict=False)]
        room: ByBlock = [torch.empty_like(flatten(block)) if there else None for block, there in blocks]
        tensors = self._of_method(prefix, kind, room, _as_it_is)
        self._together(lambda: self._read(path, reshape, tensors, {}))
        return [
            self.engine.from_sharded(
                block, {name: tensors[f"{prefix}{kind}.{name}"] for name in block.parameter_names}
            ).cpu()
            if there
            else None
            for block, there in blocks
        ]

    def _of_engine(self, keep: Keep) -> dict[str, torch.Tensor]:
        """Weights and moments of this replica."""
        replica = self.mesh.replica.rank
        return {f"replica{replica}.{name}": keep(tensor) for name, tensor in self.engine.state_dict().items()}

    def _of_method(self, prefix: str, kind: str, flats: ByBlock, keep: Keep) -> dict[str, torch.Tensor]:
        """One kind of the method's tensors. A block that rests on the CPU is on the device until it is kept."""
        return {
            f"{prefix}{kind}.{name}": keep(tensor)
            for block, flat in zip(self.engine.blocks, flats, strict=False)
            if flat is not None
            for name, tensor in self.engine.as_sharded(block, flat).items()
        }

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

    def _kinds(self, shared: dict[str, T], own: dict[str, T]) -> Iterator[tuple[str, str, T]]:
        """(prefix in the checkpoint, kind, what is given of it) of all the method's tensors."""
        for prefix, kinds in (("", shared), (f"replica{self.mesh.replica.rank}.sync.", own)):
            yield from ((prefix, kind, given) for kind, given in kinds.items())

    def _retain(self, newest: int) -> None:
        """Delete what is neither among the newest, kept for good nor in use; runs after the new one is complete."""
        steps = [step for step, _ in complete(self.directory) if step <= newest]
        for step in self.section.superseded(steps):
            if step not in self.in_use():
                shutil.rmtree(self.directory / folder_name(step), ignore_errors=True)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copied_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _blocks_there(kinds: dict[str, ByBlock]) -> dict[str, list[bool]]:
    return {kind: [flat is not None for flat in flats] for kind, flats in kinds.items()}
