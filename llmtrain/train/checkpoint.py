"""Checkpoints: the complete state of a run, and how it is saved and restored. `checkpoint_files` writes and checks the
files, and `checkpoint_reader` reads tensors from them.

Per-replica tensors (weights, optimizer moments, rounding errors) are stored under `replica<r>.`. Shared tensors
(anchor, outer momentum, means in flight) are stored once. A checkpoint can be loaded on another mesh; see `reshard`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmtrain.checkpoint_retention import CheckpointLoss, expired, stored_loss
from llmtrain.config import CheckpointSection, Recipe
from llmtrain.errors import TrainingError
from llmtrain.files import holder_text
from llmtrain.parallel.engine import Engine, Keep, as_is
from llmtrain.parallel.mesh import Mesh
from llmtrain.recipe_loader import stored_recipe
from llmtrain.reshard import MeshChange, Rules
from llmtrain.run_files import complete_checkpoints, step_name, step_of
from llmtrain.seeding import derive_seed
from llmtrain.sync.anchors import BlockTensors, flat_view
from llmtrain.sync.method import Method
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.checkpoint_files import FORMAT, VALIDATED_ANCHOR, CheckpointWriter, read_state
from llmtrain.train.checkpoint_reader import CheckpointReader
from llmtrain.train.mirror import Mirror
from llmtrain.train.rank_errors import raise_on_all
from llmtrain.train.run_dir import check_same_recipe
from llmtrain.train.run_length import LengthChange
from llmtrain.turns import own_time
from llmtrain.waiting import announced

LAST_SECONDS = 60.0
"""Maximum seconds for which a run that ends with an error waits until the checkpoint in progress is written."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Content of a loaded checkpoint, without the tensors."""

    step: int
    progress: dict[str, Any]
    """This rank's plain values, as stored by `Checkpointer.save` and resharded to this mesh."""
    how: str
    """Console text that describes how the state was resharded; empty if it was not."""
    length: LengthChange | None = None
    """Change of the run's length or global batch; None if neither has changed."""


class Checkpointer:
    """Checkpoint manager of one run directory. Every rank creates one."""

    def __init__(
        self,
        directory: Path,
        mesh: Mesh,
        engine: Engine,
        method: Method,
        section: CheckpointSection,
        timeout_seconds: float,
        recipe: Recipe | None = None,
        note: Callable[[str], None] = lambda text: None,
    ):
        """Store `recipe`, if given, in each checkpoint, and refuse to load a checkpoint of another recipe. Report
        complete checkpoints through `note`."""
        self.directory, self.mesh, self.engine, self.method = directory, mesh, engine, method
        self.section, self.timeout_seconds, self.recipe, self.note = section, timeout_seconds, recipe, note
        self.from_weights: dict[str, Any] | None = None
        """Path, step and digest of the weights that the run started from; None for random ones. Stored in each checkpoint."""
        self.seconds = 0.0
        """Seconds for which checkpoints have blocked training."""
        self.followers: list[BackgroundEval | Mirror] = []
        """Readers of complete checkpoints. A checkpoint is not deleted while one of them still has to read it."""
        self._holder = holder_text(directory.parent)  # this process, if it has locked the run directory
        self._writing: CheckpointWriter | None = None
        self._losses: dict[int, CheckpointLoss | None] = {}  # read once from each checkpoint

    def save(self, step: int, progress: Callable[[], dict[str, Any]]) -> None:
        """Start writing the state after global step `step`. A collective of all ranks.

        Returns once the state has been copied to memory that training does not modify or, if `checkpoint.background` is
        off, once the checkpoint is complete. `progress` returns this rank's plain values. It is called after messages
        in flight have arrived, so that their bytes are counted.

        Raises TrainingError if the previous checkpoint, or this one if `checkpoint.background` is off, could
        not be written.
        """
        self.wait()
        started = own_time()
        shared, own = self.method.shared_state(), self.method.per_replica_state()
        # If the engine returns copies, they must not all be on the device at once.
        is_staged = self.section.background or (self.engine.returns_copies and self.mesh.device.type == "cuda")
        keep = _stage_to_cpu if is_staged else as_is
        prefix = f"replica{self.mesh.replica_comms.rank}"
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self.engine.state_dict(keep).items()}
        for key_prefix, kinds in (("", shared), (f"{prefix}.sync.", own)):
            for kind, flats in kinds.items():
                # Offloaded blocks pass through the device one at a time. Without a copy back, all would be on it at once.
                are_offloaded = any(flat is not None and flat.device != self.mesh.device for flat in flats)
                named = self._named_parts(flats, _stage_to_cpu if are_offloaded else keep)
                tensors |= {f"{key_prefix}{kind}.{name}": tensor for name, tensor in named.items()}
        tensors |= {f"rank{self.mesh.world.rank}.{name}": keep(state) for name, state in self._generators().items()}
        if self.mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # for all copies at once, instead of after each
        state = {"format": FORMAT, "step": step, "mesh": [self.mesh.replicas, self.mesh.shard_comms.size]}
        state |= {"shared": _present_blocks(shared), "own": _present_blocks(own)}
        if self.method.validated_blocks() is not None:
            state["validated"] = VALIDATED_ANCHOR
        if self.recipe is not None:
            state["recipe"] = self.recipe.model_dump(mode="json")
        if self.from_weights is not None:
            state["from_weights"] = self.from_weights
        final, comms = self.directory / step_name(step), self.mesh.checkpoint_group
        mine = {"method": self.method.state_dict(), **progress()}
        # With two sites, the disk is at the first site (launch/two_sites.md), so tensors that both sites have need not cross the
        # link.
        spans_hosts = self.mesh.world.local_size < self.mesh.world.size
        prune = partial(self._prune, step)
        self._writing = CheckpointWriter(final, tensors, state, mine, comms, prune, spans_hosts, self._holder)
        self._writing.start(in_thread=self.section.background)
        self.seconds += own_time() - started

    def wait(self) -> None:
        """Wait until the checkpoint that `save` started is on disk, and report it. Raises TrainingError if writing fails or times
        out."""
        started = own_time()
        if self._writing is not None:
            speaks = announced(f"{self._writing.final} to be written", self.timeout_seconds)
            with speaks if self.mesh.is_main else nullcontext():
                self._writing.wait(self.timeout_seconds)
        self.seconds += own_time() - started
        self.poll()

    def finish_writing(self) -> None:
        """Wait up to LAST_SECONDS for the checkpoint in progress when an error ends the run: its state is from before
        the error. Raises nothing."""
        if self._writing is not None:
            with suppress(TrainingError):
                self._writing.wait(min(LAST_SECONDS, self.timeout_seconds))

    def poll(self) -> None:
        """Report the last checkpoint, once, when it is complete: through `note` and to `followers`."""
        writing = self._writing
        if writing is None or not writing.is_done or writing.error is not None:
            return
        self._writing = None
        self.note(f"checkpoint {writing.final} (written in {writing.seconds:.1f} s)")
        for follower in self.followers:
            follower.after_checkpoint(step_of(writing.final))

    @property
    def failed(self) -> bool:
        """Return whether the last checkpoint could not be written. The next `save` or `wait` raises the error."""
        return self._writing is not None and self._writing.is_done and self._writing.error is not None

    def load(self, path: Path, rules: Rules, seed: int) -> LoadedCheckpoint:
        """Restore the state in `path`, written on any mesh. A collective of all ranks.

        `rules` determine how the plain values stored by `save` are resharded. A rank whose position the old mesh did
        not have derives the state of its random number generators from `seed`. Raises CheckpointError, on every rank,
        if the checkpoint is damaged or can't be continued on this mesh. Raises RecipeError, on every rank, if it
        belongs to another recipe, or can't be continued with the recipe's length or global batch.
        """
        state, length = raise_on_all(self.mesh, lambda: self._open(path))
        size = self.mesh.replicas, self.mesh.shard_comms.size
        position = self.mesh.replica_comms.rank, self.mesh.shard_comms.rank
        old_batch = None if length is None else length.old_global_batch
        change = MeshChange(*state["mesh"], *size, *position, state["step"], old_batch)
        progress = change.apply({**rules, "method": self.method.reshard_rules()}, state["ranks"])
        method = progress.pop("method")
        # This seeds ranks whose position the old mesh did not have. `_read_engine` replaces the state on the others.
        torch.manual_seed(derive_seed(seed, "rank", *position, "since", state["step"]))
        generators = self._generators()
        self._read_engine(path, change, generators)
        torch.set_rng_state(generators["rng"])
        if "cuda_rng" in generators:
            torch.cuda.set_rng_state(generators["cuda_rng"], self.mesh.device)
        of_method = {kind: self._read_kind(path, f"{kind}.", present) for kind, present in state["shared"].items()}
        for kind, present in state["own"].items():
            of_method[kind] = self._read_kind(path, f"sync.{kind}.", present, change, change.factor(kind))
        self.method.load_state_dict(method, of_method)
        self.from_weights = state.get("from_weights")
        changed = length if length is not None and length.is_change else None
        return LoadedCheckpoint(state["step"], progress, change.describe(), changed)

    def _open(self, path: Path) -> tuple[dict[str, Any], LengthChange | None]:
        """Return the state of `path`, and how its run's length and batch differ from the recipe's. Raises as `load` does."""
        state = read_state(path)
        if self.recipe is None or "recipe" not in state:
            return state, None
        stored = stored_recipe(state["recipe"], str(path))
        check_same_recipe(stored, self.recipe, str(path))
        length = LengthChange(stored, self.recipe, state["step"])
        length.check(str(path))
        return state, length

    def _read_engine(self, path: Path, change: MeshChange, generators: dict[str, torch.Tensor]) -> None:
        """Load weights, optimizer moments and generator states. The buffers for reading are freed on return. With ZeRO,
        they are a second copy of the state."""
        tensors = self.engine.state_dict(as_is)

        def read() -> None:
            stored = CheckpointReader(path)
            _fill(stored, tensors, change)
            mine = {f"rank{change.same_rank}.{name}": state for name, state in generators.items()}
            stored.read({name: state for name, state in mine.items() if name in stored.tensors})

        raise_on_all(self.mesh, read)
        self.engine.load_state_dict(tensors)

    def _read_kind(
        self, path: Path, prefix: str, present: list[bool], change: MeshChange | None = None, factor: float = 1.0
    ) -> BlockTensors:
        """Read one kind of the method's tensors, such as the anchors, and return them on the CPU by block, so that the device
        holds one kind at a time. `present` says which blocks the checkpoint has. See `_fill` for `change` and `factor`."""
        blocks = list(zip(self.engine.blocks, present, strict=False))
        flats: BlockTensors = [torch.empty_like(flat_view(block)) if is_stored else None for block, is_stored in blocks]
        parts = self._named_parts(flats, as_is)
        tensors = {prefix + name: tensor for name, tensor in parts.items()}
        raise_on_all(self.mesh, lambda: _fill(CheckpointReader(path), tensors, change, factor))
        return [self.engine.from_dtensors(block, parts).cpu() if is_stored else None for block, is_stored in blocks]

    def _named_parts(self, flats: BlockTensors, keep: Keep) -> dict[str, torch.Tensor]:
        """Split the blocks' flat tensors by parameter, and return the parts by name. An offloaded block is on the device only
        until `keep` has copied it."""
        return {
            name: keep(tensor)
            for block, flat in zip(self.engine.blocks, flats, strict=False)
            if flat is not None
            for name, tensor in self.engine.to_dtensors(block, flat).items()
        }

    def _generators(self) -> dict[str, torch.Tensor]:
        """Return the states of this rank's random number generators."""
        states = {"rng": torch.get_rng_state()}
        if self.mesh.device.type == "cuda":
            states["cuda_rng"] = torch.cuda.get_rng_state(self.mesh.device)
        return states

    def _prune(self, newest: int) -> None:
        """Delete expired checkpoints, except those that a follower has yet to read. Called on the main rank, once the checkpoint
        of `newest` is complete. Raises OSError if a loss can't be read now, because that checkpoint might be the best."""
        self._losses = {
            step: self._losses[step] if step in self._losses else stored_loss(path)
            for step, path in complete_checkpoints(self.directory).items()
            if step <= newest
        }
        for step in expired(self._losses, self.section):
            if not any(step in follower.pending_steps() for follower in self.followers):
                folder = self.directory / step_name(step)
                # Renamed first, so that a half-deleted folder does not count as a checkpoint, and the next start deletes it.
                with suppress(OSError):
                    folder = folder.rename(folder.with_suffix(".tmp"))
                shutil.rmtree(folder, ignore_errors=True)


def _fill(
    stored: CheckpointReader, tensors: dict[str, torch.Tensor], change: MeshChange | None, factor: float = 1.0
) -> None:
    """Fill `tensors` in place: shared tensors or, with `change`, this replica's own. If the number of replicas has
    changed, its own tensors become `factor` x the mean over the old replicas. Not a collective."""
    if change is None:
        stored.read(tensors)
    elif not change.replicas_changed:
        stored.read({f"replica{change.replica}.{name}": tensor for name, tensor in tensors.items()})
    else:
        for name, tensor in tensors.items():
            stored.read_mean([f"replica{replica}.{name}" for replica in change.source_replicas], tensor, factor)


def _stage_to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory. A copy from a GPU is only started. It goes to pinned memory, which torch reuses for
    the next checkpoint."""
    return tensor.detach().to("cpu", copy=True, non_blocking=True)


def _present_blocks(kinds: dict[str, BlockTensors]) -> dict[str, list[bool]]:
    return {kind: [flat is not None for flat in flats] for kind, flats in kinds.items()}
