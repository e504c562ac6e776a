"""Checks of `LocalUpdates`, which refuse loops, modules and choices that hooks around an optimizer's steps cannot synchronize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from llmtrain.config import AutoOuterSection, SyncSection
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.sharded import uses_fsdp1
from llmtrain.parallel.world import environment_number
from llmtrain.sync.period import warmup_of


def check_types(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Mapping[str, dist.ProcessGroup | None],
    layers: Sequence[nn.Module] | None,
    lr: LRSchedule | None,
    timeout_seconds: float,
) -> None:
    """Raise RecipeError for an argument of a wrong type or range."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        given = f"{type(model).__name__}, {type(optimizer).__name__}"
        raise RecipeError(f"LocalUpdates({given}, ...) takes the module, then its torch.optim.Optimizer")
    if isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):  # of Accelerate, for example
        raise RecipeError(f"{type(optimizer).__name__} has another optimizer inside; give LocalUpdates its .optimizer")
    for name, group in groups.items():
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise RecipeError(
                f"{name} is {group!r}, expected a process group with this rank, as torch.distributed.new_group or mesh.get_group gives"
            )
    if layers is not None and not (
        isinstance(layers, Sequence | nn.ModuleList | nn.Sequential)
        and all(isinstance(one, nn.Module) for one in layers)
    ):
        raise RecipeError(
            f"layers is {type(layers).__name__}, expected a list of modules, such as model.layers; each is a block"
        )
    if lr is not None and not isinstance(lr, LRSchedule):
        raise RecipeError(
            f"lr is {lr!r}, expected llmtrain.lr.LRSchedule.create(peak=..., total_steps=...); leave it out unless rounds follow the "
            "learning rate, which is the optimizer's"
        )
    if not (isinstance(timeout_seconds, int | float) and timeout_seconds > 0):
        raise RecipeError(f"timeout_seconds is {timeout_seconds!r}, expected a number greater than 0")


def check_choices(
    sync: SyncSection,
    is_sharded: bool,
    replicas: dist.ProcessGroup | None,
    shards: dist.ProcessGroup | None,
    lr: LRSchedule | None,
    store: dist.Store | None,
) -> None:
    """Raise RecipeError for choices that hooks around an optimizer's steps cannot support, or that lack an argument."""
    if sync.pull is not None or sync.period.is_timed:
        what = (
            "sync.pull decides before a step whether there is a gradient"
            if sync.pull
            else "timed rounds decide when a run ends"
        )
        raise RecipeError(f"{what}, which needs llmtrain's own loop; use another method, or a recipe")
    if sync.reduction.counts_tokens:
        raise RecipeError(
            f"sync.reduction={sync.reduction.kind} counts the tokens of a step, which needs llmtrain's own loop; use another "
            "reduction, or a recipe"
        )
    if isinstance(sync.outer, AutoOuterSection):
        raise RecipeError(
            "sync.outer=auto follows from the number of rounds, which a loop's hooks do not know; give kind, lr and momentum"
        )
    if replicas is None and not dist.is_initialized() and environment_number("WORLD_SIZE", 1) > 1:
        raise RecipeError(
            "this is one of several processes: call torch.distributed.init_process_group before LocalUpdates"
        )
    if is_sharded and shards is None:
        raise RecipeError("the module is sharded: give the process group of this replica's ranks as shards")
    if not is_sharded and shards is not None and dist.get_world_size(shards) > 1:
        raise RecipeError(
            f"shards has {dist.get_world_size(shards)} ranks, but the module is not sharded with FSDP2; leave out shards, and give the "
            "ranks with the same place in their replicas as replicas"
        )
    if is_sharded and replicas is None:
        raise RecipeError("the module is sharded: give the process group of the ranks with the same shard as replicas")
    if is_sharded and sync.schedule.syncs_in_forward:
        raise RecipeError(
            f"sync.schedule={sync.schedule.kind} changes parameters in the forward pass, when FSDP2 may have gathered them already; "
            "use schedule='blocking'"
        )
    if lr is None and follows_rates(sync):
        raise RecipeError(
            f"method {sync.method} follows the learning rate: give lr=llmtrain.lr.LRSchedule.create(peak=..., total_steps=...)"
        )
    if lr is not None and sync.warmup_until_lr is not None and warmup_of(sync, lr) >= lr.total_steps:
        raise RecipeError(
            f"sync.warmup_until_lr is {sync.warmup_until_lr}, a share of the peak to which lr never falls, so that all steps would "
            "average gradients; give another schedule, or another share"
        )
    if store is None and sync.schedule.needs_threads:
        raise RecipeError(
            f"sync.schedule={sync.schedule.kind} needs store, a torch.distributed.Store that all ranks share"
        )
    if sync.schedule.needs_threads and sync.period.min_length == 1:
        raise RecipeError(
            f"sync.period.{sync.period.shortest_round} is 1, but with sync.schedule={sync.schedule.kind} a loop needs rounds of at "
            "least 2; give more, or use local_sgd"
        )


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate of the optimizer's first parameter group. Raise RecipeError if it has none."""
    rate = optimizer.param_groups[0].get("lr")
    if rate is None:
        raise RecipeError(
            f"{type(optimizer).__name__} has no learning rate (lr of its first parameter group), expected a number; give it one "
            "(transformers' Adafactor: relative_step=False, lr=1e-3)"
        )
    return float(rate)


def follows_rates(sync: SyncSection) -> bool:
    """Return whether the learning rate decides when replicas synchronize."""
    return sync.period.follows_lr or sync.warmup_until_lr is not None


def find_rate_mismatch(lr_schedule: LRSchedule, step: int, optimizer: torch.optim.Optimizer) -> str | None:
    """Return a message if no parameter group of the optimizer has the schedule's learning rate in this step, or None. In the
    schedule's warm-up, on which no round depends, any rate is accepted."""
    if step <= lr_schedule.warmup_steps:
        return None
    groups = optimizer.param_groups
    if any(lr_schedule.has_rate(step, float(group["lr"])) for group in groups):
        return None
    return (
        f"the optimizer's learning rate is {float(groups[0]['lr']):g}, but lr, which decides when replicas synchronize, has "
        f"{lr_schedule.at(step):g}; give both the same schedule"
    )


def needs_equal_rates(sync: SyncSection) -> bool:
    """Return whether outer steps depend on the learning rate, in a schedule in which each replica may use its own rate."""
    follows_rates = getattr(sync.outer, "normalize", "none") != "none" or getattr(sync.schedule, "gap_penalty", False)
    return follows_rates and not sync.schedule.syncs_all_blocks


def check_equal_rates(replicas: Comms, step: int, rate: float) -> None:
    """Raise RecipeError, on every rank, if replicas have different learning rates. A collective of the replica group."""
    rates = replicas.all_gather(
        torch.tensor(rate, dtype=torch.float64, device=replicas.device), "comparing the replicas' learning rates"
    )
    if (rates != rates[0]).any():
        listed = ", ".join(f"{rate:g}" for rate in rates.tolist())
        raise RecipeError(
            f"replicas have different learning rates in step {step} ({listed}), but these outer steps "
            "depend on them; set the same one on all replicas"
        )


def check_current_device(device: torch.device) -> None:
    """Raise RecipeError if the replica is on another GPU than the process's current device, which NCCL and CUDA's streams and events
    would use instead."""
    if device.type == "cuda" and device.index != (current := torch.cuda.current_device()):
        raise RecipeError(
            f"the parameters are on {device}, but this process's current device is cuda:{current}; call "
            f"torch.cuda.set_device({device.index}) before init_process_group"
        )


def check_wrapping(model: nn.Module, replicas: dist.ProcessGroup | None) -> None:
    """Raise RecipeError if the module divides batches among several GPUs of this process, is sharded by FSDP1, or averages gradients
    over the replicas itself, in every step."""
    if isinstance(model, DataParallel):
        raise RecipeError(
            "torch.nn.DataParallel uses all GPUs that a process sees, so that processes share them; leave it out, and give each process "
            "one GPU"
        )
    if uses_fsdp1(model):
        raise RecipeError(
            "the module is sharded with FullyShardedDataParallel; shard it inside each replica with FSDP2's fully_shard"
        )
    if not dist.is_initialized():
        return
    ours = set(dist.get_process_group_ranks(dist.group.WORLD if replicas is None else replicas))
    averaging = [model.process_group] if isinstance(model, DistributedDataParallel) else []
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            axes = [axis for axis, placement in enumerate(parameter.placements) if placement.is_replicate()]
            averaging += [parameter.device_mesh.get_group(axis) for axis in axes]
    if any(len(ours & set(dist.get_process_group_ranks(group))) > 1 for group in averaging):
        raise RecipeError(
            "the module averages the replicas' gradients in every backward pass; leave out DistributedDataParallel, or give fully_shard "
            "the mesh of one replica (mesh['shard'])"
        )


def check_rank_order(replicas: Comms, shards: Comms) -> None:
    """Raise RecipeError unless the ranks of a replica are consecutive, as the groups of the wait-avoiding schedule require."""
    for comms, expected in (
        (replicas, [r * shards.size + shards.rank for r in range(replicas.size)]),
        (shards, [replicas.rank * shards.size + s for s in range(shards.size)]),
    ):
        if comms.group is not None and (found := dist.get_process_group_ranks(comms.group)) != expected:
            raise RecipeError(
                f"the {comms.axis} group of rank {dist.get_rank()} has ranks {found}, expected {expected}: with this schedule, the ranks "
                "of a replica must follow each other; make the mesh with replicas as its first dimension"
            )
