"""Comparisons of the replicas of `LocalUpdates` in a loop's first step and at its end. All ranks come to the same result."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Set
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.errors import RecipeError, TrainingError
from llmtrain.parallel.comms import Comms
from llmtrain.sync.own_loop.module_replica import ModuleReplica

LISTED = 4
"""Maximum number of ranks that a message names."""


@dataclass(frozen=True)
class LoopStart:
    """Facts about this rank's loop, before its first step after construction or after loading a state."""

    steps: int
    """Optimizer steps so far: more than 0 only if a state was loaded."""
    choices: str
    """Method, keys, learning rates and blocks as one text, which must be equal on all ranks."""
    anchors: int
    """Fingerprint of the anchors; 0 without any."""
    is_different_module: bool
    """True if a state was loaded and the module's parameters differ from those with which it was saved."""
    is_synchronized: bool
    """True if the replicas must have equal parameters before this step."""
    averages_gradients: bool
    """True if this step averages gradients, so that the optimizers must be equal, too."""


def check_equal_start(replicas: Comms, shards: Comms, replica: ModuleReplica, start: LoopStart) -> str | None:
    """Raise RecipeError, on every rank, if the ranks' choices differ, if the ranks have loaded states that do not belong together, or
    if parameters or moments differ between replicas although they must be equal. Return a warning if moments differ that need not
    be equal, or None. A collective of all ranks."""
    row = (
        _rank(),
        start.steps,
        zlib.crc32(start.choices.encode()),
        start.anchors,
        start.is_different_module,
        start.is_synchronized,
        start.averages_gradients,
    )
    found = _gather(replicas, shards, torch.tensor(row, device="cpu"), "comparing the ranks' loops")
    ranks, steps, choices, anchors, others, synchronized, averaging = found.unbind(-1)
    if (choices != choices[0, 0]).any():
        raise RecipeError(
            f"rank {ranks[choices != choices[0, 0]][0]} and rank {ranks[0, 0]} have different arguments: method, keys, lr, layers or "
            "groups; construct LocalUpdates with the same arguments on all ranks"
        )
    if (steps != steps[0, 0]).any():
        begun = zip(ranks.flatten().tolist(), steps.flatten().tolist(), strict=True)
        texts = [(rank, f"continues from step {done}" if done else "has no state") for rank, done in begun]
        raise RecipeError(f"{_listed(texts)}; load checkpoints of the same step on all ranks")
    if (anchors != anchors[:, :1]).any():
        raise RecipeError(
            f"the states of step {start.steps} have different anchors, so they are of different runs; load states that the ranks of "
            "one run saved"
        )
    if others.any():
        raise RecipeError(
            f"the module of rank {ranks[others != 0][0]} does not have the parameters with which its state was saved; load module, "
            "optimizer and state that the same rank saved at the same step"
        )
    when = f"step {start.steps + 1}" if start.steps else "the first step"
    if synchronized.all() and (name := _differing_block(replicas, shards, replica)) is not None:
        raise RecipeError(
            f"replicas differ in {name} before {when}; give them the same model and seed, or load the same weights"
        )
    if not averaging.all() and start.steps > 0:
        return None  # within a round, every replica has its own moments
    if (name := _block_of_differing_moments(replicas, shards, replica)) is None:
        return None
    text = f"the replicas' optimizers have different moments of {name} before {when}"
    if averaging.all():
        raise RecipeError(
            f"{text}, so equal gradients would not keep replicas equal; to continue an earlier loop, load its state with load_state_dict; "
            "otherwise use a new optimizer, or warmup_steps=0"
        )
    return f"{text}; if this continues an earlier loop, load its state with load_state_dict"


def check_equal_steps(replicas: Comms, steps: int, note: int = 0) -> bool:
    """Raise TrainingError, on all replicas, if they have taken different numbers of steps. Return whether they have the same
    `note`. A collective of the replica group.

    This comparison precedes all other messages of a step or of `finish`, and always has the same shape. Ranks at different
    points of the loop therefore meet here, and not in collectives of different kinds, in which gloo may abort the process."""
    row = torch.tensor((_rank(), steps, note), device=replicas.device)
    ranks, taken, notes = replicas.all_gather(row, "comparing the ranks' steps").cpu().unbind(-1)
    if (taken != taken[0]).any():
        texts = zip(ranks.tolist(), (f"has taken {n} steps" for n in taken.tolist()), strict=True)
        raise TrainingError(f"{_listed(texts)}; all ranks must take the same number of optimizer steps")
    return bool((notes == notes[0]).all())


def check_equal_end(replicas: Comms, shards: Comms, replica: ModuleReplica, elsewhere: Set[nn.Parameter]) -> str | None:
    """Raise TrainingError, on every rank, if replicas differ after the last synchronization. Return a warning if they differ in
    parameters of the module that no loop synchronizes, or None. `elsewhere` holds the parameters that other open loops synchronize,
    which are not compared. A collective of all ranks."""
    if (name := _differing_block(replicas, shards, replica)) is not None:
        raise TrainingError(
            f"replicas differ in {name} after the last synchronization, so something other than this loop has changed them: check that "
            "every rank loaded model, optimizer and state of the same step, and that nothing else writes to parameters"
        )
    what = "comparing the module's other parameters"
    others = _gather(replicas, shards, replica.fingerprint_without(elsewhere), what)
    if (others == others[:, :1]).all():
        return None
    return (
        "replicas differ in parameters of the module that are not the optimizer's; if another optimizer trains them, give it a "
        "LocalUpdates of its own, and if they are frozen, load the same ones on all ranks"
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _gather(replicas: Comms, shards: Comms, values: torch.Tensor, what: str) -> torch.Tensor:
    """Return the values of all ranks, on the CPU: [shards, replicas, *shape]."""
    gathered = replicas.all_gather(values.to(replicas.device), what)
    return shards.all_gather(gathered.to(shards.device), what).cpu()


def _differing_block(replicas: Comms, shards: Comms, replica: ModuleReplica) -> str | None:
    """Return the name of the first block in which replicas have different parameters, or None."""
    return _first_differing(
        replica, _gather(replicas, shards, replica.fingerprint(), "comparing the replicas' parameters")
    )


def _block_of_differing_moments(replicas: Comms, shards: Comms, replica: ModuleReplica) -> str | None:
    sums = replica.fingerprint_of_moments()
    return _first_differing(replica, _gather(replicas, shards, sums, "comparing the replicas' moments"))


def _first_differing(replica: ModuleReplica, sums: torch.Tensor) -> str | None:
    differ = (sums != sums[:, :1]).flatten(0, 1).any(0).nonzero().flatten().tolist()
    return replica.blocks[differ[0]].name if differ else None


def _listed(texts: Iterable[tuple[int, str]]) -> str:
    """Return at most LISTED different texts in one line, each with the first rank to which it belongs."""
    first: dict[str, int] = {}
    for rank, text in sorted(texts):
        first.setdefault(text, rank)
    return ", ".join(f"rank {rank} {text}" for text, rank in list(first.items())[:LISTED])
