"""Synchronization in your own training loop: `LocalUpdates` hooks into the optimizer's steps (docs/library.md)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.config import LRScheduleSection, SyncSection
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import Block, Replica
from llmtrain.parallel.fsdp import release_gathered
from llmtrain.parallel.optimizers import moments_of
from llmtrain.sync.anchors import INTEGERS
from llmtrain.sync.build_method import build_method, build_wire
from llmtrain.sync.compatibility import find_conflict
from llmtrain.sync.methods import METHODS
from llmtrain.sync.sync_stats import SyncStats

ENDLESS = 2**62
"""Total steps that stand for a loop of unknown length."""
_LOOPS = itertools.count()
"""Numbers for the loops of this process that use a store. They agree between ranks, because all ranks create the same loops."""


class ModuleReplica(Replica):
    """Replica that consists of a module, or this rank's shards of it, and the optimizer that trains it.

    Each layer is a block. The parameters outside the layers form the first block, "rest". Blocks have trainable parameters
    only, and there is no block for a layer without any.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer):
        seen: set[nn.Parameter] = set()
        of_layers = [(f"layer {i}", layer, _take(layer, seen)) for i, layer in enumerate(layers)]
        units = [unit for unit in [("rest", model, _take(model, seen)), *of_layers] if unit[2]]
        if not units:
            raise RecipeError("the module has no trainable parameters, so there is nothing to synchronize")
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.blocks = [
            Block(name, [_local(parameter) for parameter in unit], [names[parameter] for parameter in unit])
            for name, _, unit in units
        ]
        self._modules = [module for _, module, _ in units]
        self._optimizer, self._units = optimizer, [unit for _, _, unit in units]
        self._module_of = {block.name: module for block, module in zip(self.blocks, self._modules, strict=True)}

    def fingerprint(self) -> torch.Tensor:
        """Return a checksum of the bits of this rank's shards for each block: [blocks], int64, on the CPU."""
        sums = [
            sum(
                shard.contiguous().view(INTEGERS[shard.element_size()]).sum(dtype=torch.int64) for shard in block.shards
            )
            for block in self.blocks
        ]
        return torch.stack(sums).cpu()

    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        def before(index: int) -> Callable[[nn.Module, Any], None]:
            return lambda module, inputs: hook(index) if module.training and torch.is_grad_enabled() else None

        for index, module in enumerate(self._modules):
            module.register_forward_pre_hook(before(index), prepend=True)

    def parameters_changed(self, block: Block) -> None:
        """Release what FSDP2 has gathered before the change. After a forward without backward, it keeps the root's parameters."""
        release_gathered(self._module_of[block.name])

    def moments(self, index: int, order: int) -> list[torch.Tensor | None]:
        moments = moments_of(self._optimizer.state, self._units[index], order)
        return [None if moment is None else _local(moment) for moment in moments]


class LocalUpdates:
    """Local-update synchronization of a module between replicas, driven by its optimizer's steps.

    Construct it on every rank before the first step, train as before, and call `finish` at the end. All replicas must
    start with the same parameters, which the first step checks. Every optimizer step counts as one step. In synchronous
    steps, gradients are averaged over the replicas just before the optimizer uses them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: str = "diloco",
        *,
        replicas: dist.ProcessGroup | None = None,
        shards: dist.ProcessGroup | None = None,
        layers: Sequence[nn.Module] | None = None,
        lr: LRSchedule | None = None,
        store: dist.Store | None = None,
        timeout_seconds: float = 600,
        **choices: Any,
    ):
        """Set up `method` with its preset, changed by `choices`: keys of a recipe's `sync` section, such as
        `period={"every": 50}` or `wire="int8"`.

        `replicas` is the process group of the ranks with the same shard, one per replica (default: all ranks, for unsharded
        replicas). `shards` is the group of this replica's ranks, if FSDP2 has sharded the module. `layers` are the modules
        that are synchronized one by one (default: the elements of the longest ModuleList or Sequential). Choices that follow
        the learning rate need `lr`. The wait-avoiding schedule needs `store`. Its waits end after `timeout_seconds`; those of
        the groups end after their own timeouts. Raises RecipeError for choices that cannot be combined, that such a loop
        cannot support, or that lack an argument.
        """
        self.sync = _section(method, choices)
        parameters = list(model.parameters())
        sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        _check(self.sync, sharded, shards, lr, store)
        self.replica = ModuleReplica(model, _layers_of(model) if layers is None else layers, optimizer)
        device = self.replica.blocks[0].shards[0].device
        self.sync.schedule.check(self.sync, len(self.replica.blocks))
        self._replicas = Comms(dist.group.WORLD if replicas is None else replicas, device, "replica")
        self._shards = Comms(shards, device, "shard")
        if store is not None and self.sync.schedule.needs_threads:
            # Each loop has keys of its own, because one store may serve several loops, one after the other.
            _check_order(self._replicas, self._shards)
            store = dist.PrefixStore(f"llmtrain/loop{next(_LOOPS)}", store)
        rates = lr or LRSchedule(optimizer.param_groups[0]["lr"], ENDLESS, LRScheduleSection(kind="constant"))
        self._gradient_wire = build_wire(self.sync.wire) if self.sync.wire.gradients else None
        self._method = build_method(
            self.sync,
            self.replica,
            self._replicas,
            self._shards,
            rates,
            seed=0,
            store=store,
            timeout_seconds=timeout_seconds,
        )
        self.step = 0
        """Optimizer steps so far."""
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def finish(self) -> None:
        """Complete a last, shorter round and remove the optimizer's hooks. Afterwards all replicas are equal."""
        with torch.no_grad():
            self._method.finish()
        self.close()

    def close(self) -> None:
        """Remove the optimizer's hooks and stop background work without synchronizing. Also for use after a failure."""
        for handle in self._handles:
            handle.remove()
        self._method.close()

    @property
    def is_synchronized(self) -> bool:
        """Return whether all replicas hold the same parameters and nothing is in flight."""
        return self._method.is_synchronized

    @property
    def bytes_sent(self) -> float:
        """Return the bytes that this rank has sent to other replicas."""
        return self._replicas.traffic.bytes

    def report(self) -> SyncStats:
        """Return the counters so far: rounds, anomalies, seconds."""
        return self._method.report()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: plain values, and lists of flat tensors by block, which may share memory with the live
        state. Waits for messages in flight. The module's and the optimizer's states are not included."""
        tensors = {**self._method.shared_state(), **self._method.per_replica_state()}
        traffic = self._replicas.traffic.state_dict()
        return {"step": self.step, "method": self._method.state_dict(), "tensors": tensors, "traffic": traffic}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` of this rank, between steps. The caller restores the module and the optimizer. A collective
        of all ranks if replicas were exchanging the weights of a reduction when the state was saved."""
        self.step = state["step"]
        self._method.load_state_dict(state["method"], state["tensors"])
        if "traffic" in state:  # earlier versions did not store it
            self._replicas.traffic.load(**state["traffic"])

    def _before_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        self.step += 1
        if self.step == 1:
            _check_equal_start(self._replicas, self._shards, self.replica)
        with torch.no_grad():
            plan = self._method.begin_step(self.step, optimizer.param_groups[0]["lr"])
            if plan.phase != "local":
                self._average_gradients(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        with torch.no_grad():
            self._method.end_step(self.step)
        for text in self._method.take_warnings():
            if self._replicas.rank == 0:
                warnings.warn(f"step {self.step}: {text}", stacklevel=2)

    def _average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace each gradient with its mean over the replicas. A replica that has not used a parameter, and so has no
        gradient for it, counts as 0."""
        if self._replicas.size == 1:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        has_gradient = torch.tensor([p.grad is not None for p in parameters], device=self._replicas.device)
        of_any = self._replicas.all_gather(has_gradient.long(), "comparing which parameters have gradients").any(0)
        for parameter, is_used in zip(parameters, of_any.tolist(), strict=True):
            if not is_used:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = _local(parameter.grad)
            mean = gradient / self._replicas.size
            gradient.copy_(self._replicas.all_reduce(mean, "averaging gradients", self._gradient_wire).wait())


def _check_equal_start(replicas: Comms, shards: Comms, replica: ModuleReplica) -> None:
    """Raise RecipeError, on every rank, if replicas hold different parameters. A collective of all ranks."""
    sums = replicas.all_gather(replica.fingerprint().to(replicas.device), "comparing the replicas' parameters")
    differs_here = (sums != sums[0]).any(0).long().to(shards.device)
    differs = shards.all_gather(differs_here, "comparing the shards' parameters").any(0)
    if differ := differs.nonzero().flatten().tolist():
        raise RecipeError(
            f"replicas differ in {replica.blocks[differ[0]].name} before the first step; give them the same seed, or load the same "
            "weights"
        )


def _check_order(replicas: Comms, shards: Comms) -> None:
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


def _section(method: str, choices: dict[str, Any]) -> SyncSection:
    if method not in METHODS:
        raise RecipeError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    if "verify_every" in choices:
        raise RecipeError("verify_every is done at log lines of llmtrain's own loop; leave it out")
    preset: dict[str, Any] = dict(METHODS[method].PRESET)
    for key, value in choices.items():
        below = preset.get(key)
        same_kind = (
            isinstance(below, dict) and isinstance(value, dict) and value.get("kind") in (None, below.get("kind"))
        )
        preset[key] = {**below, **value} if same_kind else value
    try:
        section = SyncSection.model_validate({"method": method, **preset})
    except ValueError as error:
        raise RecipeError(f"method {method}: {' '.join(str(error).split())}") from None
    if (reason := find_conflict(section)) is not None:
        raise RecipeError(reason)
    return section


def _check(
    sync: SyncSection,
    is_sharded: bool,
    shards: dist.ProcessGroup | None,
    lr: LRSchedule | None,
    store: dist.Store | None,
) -> None:
    """Raise RecipeError for choices that hooks around an optimizer's steps cannot support, or that lack an argument."""
    if sync.pull is not None or sync.period.is_timed:
        what = (
            "sync.pull decides before a step whether there is a gradient"
            if sync.pull
            else "rounds of seconds end a run"
        )
        raise RecipeError(f"{what}, which needs llmtrain's own loop; use another method, or a recipe")
    if sync.reduction.counts_tokens:
        raise RecipeError(
            f"sync.reduction={sync.reduction.kind} counts the tokens of a step, which needs llmtrain's own loop; use another "
            "reduction, or a recipe"
        )
    if is_sharded and shards is None:
        raise RecipeError("the module is sharded: give the process group of this replica's ranks as shards")
    if is_sharded and sync.schedule.syncs_in_forward:
        raise RecipeError(
            f"sync.schedule={sync.schedule.kind} changes parameters in the forward pass, when FSDP2 may have gathered them already; "
            "use schedule='blocking'"
        )
    if lr is None and (sync.period.follows_lr or sync.warmup_until_lr is not None):
        raise RecipeError(f"method {sync.method} follows the learning rate: give lr, a llmtrain.lr.LRSchedule")
    if store is None and sync.schedule.needs_threads:
        raise RecipeError(
            f"sync.schedule={sync.schedule.kind} needs store, a torch.distributed.Store that all ranks share"
        )
    if sync.schedule.needs_threads and sync.period.min_length == 1:
        raise RecipeError(
            f"sync.period.{sync.period.shortest_round} is 1, but with sync.schedule={sync.schedule.kind} a loop needs rounds of at "
            "least 2; give more, or use local_sgd"
        )


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len, default=nn.ModuleList())


def _take(module: nn.Module, seen: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return a module's trainable parameters that are not in `seen`, and add them to it, so that shared ones are taken once."""
    taken = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter not in seen]
    seen.update(taken)
    return taken


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its storage."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
