"""Base of the engines in which torch computes the gradients and a torch optimizer, or one with its interface, uses them.

The loss is divided by a number of tokens that is the same on all ranks of a replica (`Engine.forward_backward`), and gradients are
*summed* over the shard group. The result is the replica's gradient, with or without other replicas. In a synchronous step, a
block's gradient is averaged over the replicas as soon as backward has completed the gradients of this block and of all later ones.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.loss import inputs_and_labels
from llmtrain.model import ModelBlock, blocks_of, initialize
from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.parallel.engine import Block, Engine, Keep, MicroBatch, as_is, count_positions, gradient_norm
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.optimizers import TrainedPart, build_sharded_optimizer, moments_of, set_lr, step_unless
from llmtrain.parallel.sharded import local
from llmtrain.parallel.wrapping import COMPUTE, wrap_layers


class TorchEngine(Engine):
    """Engine whose optimizer updates plain tensors: this rank's parts of the parameters. See `Engine` for the methods."""

    def __init__(self, parts: EngineParts):
        """Build the engine. Blocks are initialized and sharded one at a time, so at most one is in memory unsharded."""
        self.model, self.mesh = model, mesh = parts.model, parts.mesh
        parallel, optim = parts.parallel, parts.optim
        self.gradient_wait = DeviceTimer(mesh.device)
        self.compute_dtype = COMPUTE[parallel.precision]
        self.master_dtype = torch.float64 if parallel.precision == "fp64" else torch.float32
        self._clip_norm, self._skips_nonfinite = optim.clip_norm, optim.nonfinite != "stop"
        self._gradient_wire = parts.gradient_wire
        self._hooks: list[Callable[[int], None]] = []
        self._in_forward = False
        self._is_last = False
        self._missing: list[int] = []
        """Number of gradients that the step's last micro-batch has not completed yet, by block."""
        self._averaging: list[PendingCollective] = []
        """Averages in flight, from the last block to the first. This order is the same on all ranks."""
        self.blocks: list[Block] = []
        self.masters: list[list[torch.Tensor]] = []
        """Tensors of this rank that the optimizer updates, by block, in the order of `Block.shards`."""
        model_blocks = blocks_of(model)
        wrap_layers(model_blocks, parallel, parts.lengths_vary)
        for index, block in enumerate(model_blocks):
            initialize(model, block, parts.seed, mesh.device, self.master_dtype, parts.read)
            self._add_block(index, block)
            self._call_hooks_before(index, block)
        self.optimizer = build_sharded_optimizer(self._trained_parts(model_blocks), optim, mesh.shard_comms)

    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        self._hooks.append(hook)

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], replica_tokens: float | None = None
    ) -> torch.Tensor:
        if replica_tokens is None:
            replica_tokens = count_positions(micro_batches) * self.mesh.shard_comms.size
        total = torch.zeros((), device=self.mesh.device)
        for number, batch in enumerate(micro_batches, start=1):
            self._is_last = number == len(micro_batches)
            self._missing = [len(masters) for masters in self.masters]
            batch = batch.to(self.mesh.device, non_blocking=True)
            self._in_forward = True
            loss = self.model(*inputs_and_labels(batch))
            self._in_forward = False
            (loss / replica_tokens).backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        averages = self.average_gradients and self.mesh.replicas > 1
        if averages:
            self._finish_averaging()
        else:
            for index, masters in enumerate(self.masters):
                for master, gradient in zip(masters, self._take_gradients(index), strict=True):
                    master.grad = gradient
        masters = [m for group in self.optimizer.param_groups for m in group["params"] if m.grad is not None]
        norm = gradient_norm([master.grad for master in masters], self.mesh.shard_comms, exact=averages)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(masters, self._clip_norm, norm)
        set_lr(self.optimizer, lr)
        if self._skips_nonfinite:
            self.skipped = norm.isfinite().logical_not().long()
            step_unless(self.skipped, self.optimizer)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def moments(self, index: int, order: int) -> list[torch.Tensor | None]:
        return moments_of(self.optimizer.state, self.masters[index], order)

    def state_dict(self, keep: Keep = as_is) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for name, master in self._named_masters():
            state[f"weights.{name}"] = keep(self._as_dtensor(name, master.detach()))
            for key, value in self.optimizer.state[master].items():
                state[f"optimizer.{name}.{key}"] = keep(value if value.ndim == 0 else self._as_dtensor(name, value))
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, master in self._named_masters():
            master.copy_(local(state[f"weights.{name}"]))
            for key, value in self.optimizer.state[master].items():
                value.copy_(local(state[f"optimizer.{name}.{key}"]))
        for block in self.blocks:
            self.parameters_changed(block)

    def to_dtensors(self, block: Block, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = views_of(flat, block.shards)
        return {name: self._as_dtensor(name, part) for name, part in zip(block.parameter_names, parts, strict=True)}

    def from_dtensors(self, block: Block, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([local(named[name]).reshape(-1) for name in block.parameter_names])

    @contextmanager
    def eval_mode(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        def summed_loss(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            device = self.mesh.device
            return self.model(input_ids.to(device, non_blocking=True), labels.to(device, non_blocking=True))

        self.model.eval()
        try:
            with torch.no_grad():
                yield summed_loss
        finally:
            self.model.train()

    # -- for subclasses ------------------------------------------------------------------------------------------

    @abstractmethod
    def _add_block(self, index: int, block: ModelBlock) -> None:
        """Prepare a block whose weights have just been initialized. Append to `blocks` and `masters`."""

    @abstractmethod
    def _take_gradients(self, index: int) -> list[torch.Tensor | None]:
        """Return this rank's gradients of block `index`, in the shapes of its masters, and drop the engine's own references to
        them. A gradient that was not computed is None."""

    @abstractmethod
    def _as_dtensor(self, name: str, part: torch.Tensor) -> DTensor:
        """Return this rank's part of a tensor as a DTensor that is sharded like the parameter `name`."""

    def _named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's name and this rank's part of it that the optimizer updates."""
        for block, masters in zip(self.blocks, self.masters, strict=True):
            yield from zip(block.parameter_names, masters, strict=True)

    def _trained_parts(self, model_blocks: Sequence[ModelBlock]) -> list[TrainedPart]:
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        return [
            TrainedPart(master, shapes[name], model_block.is_layer)
            for model_block, block, masters in zip(model_blocks, self.blocks, self.masters, strict=True)
            for name, master in zip(block.parameter_names, masters, strict=True)
        ]

    def _when_gradient_is_there(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return a hook for the parameters of block `index`. Autograd calls it with a parameter whose gradient for a
        micro-batch is complete."""
        weak = weakref.ref(self)  # autograd keeps the hook in C++, where Python can't find a reference cycle to free

        def is_there(parameter: torch.Tensor) -> None:
            if (engine := weak()) is not None:
                engine._count_gradient(index)

        return is_there

    def _count_gradient(self, index: int) -> None:
        """Count a complete gradient of block `index` in the step's last micro-batch. Start averaging the blocks whose
        gradients are all complete, from the last block on."""
        if not (self._is_last and self.average_gradients and self.mesh.replicas > 1):
            return
        self._missing[index] -= 1
        while (following := len(self.masters) - 1 - len(self._averaging)) >= 0 and self._missing[following] == 0:
            self._start_averaging(following)

    def _call_hooks_before(self, index: int, block: ModelBlock) -> None:
        """Make a block call the block hooks before its training forward. The module hook is prepended, so that it runs
        before the existing ones, which gather the block."""

        def run(module: nn.Module, inputs: tuple) -> None:
            if self._in_forward:
                for hook in self._hooks:
                    hook(index)

        block.modules[0].register_forward_pre_hook(run, prepend=True)

    @torch.no_grad()
    def _start_averaging(self, index: int) -> None:
        message = torch.cat([gradient.reshape(-1) for gradient in self._take_gradients(index)])
        pending = self.mesh.replica_comms.start_all_reduce(message, "averaging gradients", self._gradient_wire)
        self._averaging.append(pending)

    def _finish_averaging(self) -> None:
        assert len(self._averaging) == len(self.masters), "a block has no gradient"
        with self.time_gradient_wait():
            for pending in self._averaging:
                pending.start_second_phase()
            for masters, pending in zip(reversed(self.masters), self._averaging, strict=True):
                mean = pending.wait().div_(self.mesh.replica_comms.size)
                for master, part in zip(masters, views_of(mean, masters), strict=True):
                    master.grad = part
            self._averaging.clear()


def views_of(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a flat tensor's parts in the shapes of `like`."""
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
