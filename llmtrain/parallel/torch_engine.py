"""Base of the engines that leave gradients and the optimizer's step to torch.

The loss is divided by the replica's tokens (`Engine.forward_backward`), and gradients are *summed* over the shard group.
The gradient is therefore the replica's mean, with or without other replicas. In the synchronous phase, a block's gradient is
averaged over the replicas as soon as backward has completed it.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.config import OptimSection, ParallelSection
from llmtrain.loss import inputs_and_labels
from llmtrain.model import LanguageModel, ModelBlock, ReadWeight, blocks_of, initialize
from llmtrain.parallel.comms import PendingCollective
from llmtrain.parallel.device_time import DeviceTimer
from llmtrain.parallel.engine import Block, Engine, MicroBatch, count_positions, gradient_norm
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.wire_format import WireFormat
from llmtrain.parallel.wrapping import COMPUTE, build_optimizer, decay_groups, wrap_layers


class TorchEngine(Engine):
    """Engine whose gradients are in the `grad` of the optimizer's parameters. See `Engine` for the methods."""

    def __init__(
        self,
        model: LanguageModel,
        mesh: Mesh,
        parallel: ParallelSection,
        optim: OptimSection,
        seed: int,
        read: ReadWeight | None = None,
        gradient_wire: WireFormat | None = None,
        lengths_vary: bool = False,
    ):
        """Build the engine; see `build_engine`. Blocks are built one at a time, so at most one is unsharded then."""
        self.model, self.mesh = model, mesh
        self.gradient_wait = DeviceTimer(mesh.device)
        self.compute_dtype = COMPUTE[parallel.precision]
        self.master_dtype = torch.float64 if parallel.precision == "fp64" else torch.float32
        self._clip_norm, self._skips_nonfinite = optim.clip_norm, optim.nonfinite != "stop"
        self._gradient_wire = gradient_wire
        self._hooks: list[Callable[[int], None]] = []
        self._in_forward = False
        self._is_last = False
        self._missing: list[int] = []
        """Number of gradients that the last micro-batch has not computed yet, by block."""
        self._averaging: list[PendingCollective] = []
        """Averages in flight by block, from the last to the first, so that the order is the same on all ranks."""
        self.blocks: list[Block] = []
        self.block_parameters: list[list[torch.Tensor]] = []
        """Parameters of the optimizer by block, in the order of `Block.shards`."""
        model_blocks = blocks_of(model)
        wrap_layers(model_blocks, parallel, lengths_vary)
        for index, block in enumerate(model_blocks):
            initialize(model, block, seed, mesh.device, self.master_dtype, read)
            self._add_block(index, block)
            self._call_hooks_before(index, block)
        parameters = [parameter for of_block in self.block_parameters for parameter in of_block]
        self.optimizer = build_optimizer(decay_groups(parameters, optim.weight_decay), optim)

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
            self._missing = [len(parameters) for parameters in self.block_parameters]
            batch = batch.to(self.mesh.device, non_blocking=True)
            self._in_forward = True
            loss = self.model(*inputs_and_labels(batch))
            self._in_forward = False
            (loss / replica_tokens).backward()
            total = total + loss.detach()
        return total

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        self._finish_averaging()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        averages = self.average_gradients and self.mesh.replicas > 1
        norm = gradient_norm([local(p.grad) for p in parameters], self.mesh.shard_comms, exact=averages)
        self.skipped = self._skips_nonfinite and not bool(norm.isfinite())
        if not self.skipped:
            if self._clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self._clip_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def eval_mode(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        def summed_loss(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids.to(self.mesh.device), labels.to(self.mesh.device))

        self.model.eval()
        try:
            with torch.no_grad():
                yield summed_loss
        finally:
            self.model.train()

    # -- for subclasses ------------------------------------------------------------------------------------------

    @abstractmethod
    def _add_block(self, index: int, block: ModelBlock) -> None:
        """Prepare a block whose weights have just been initialized. Append to `blocks` and `block_parameters`."""

    @abstractmethod
    def _as_gradient(self, parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's flat gradient of a parameter in the form of its `grad`, sharing the memory."""

    def _when_gradient_is_there(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return a hook for the parameters of block `index`, to be called when a micro-batch's gradient is complete."""
        weak = weakref.ref(self)  # the hook is kept in C++, and Python would never free what a strong one refers to

        def is_there(parameter: torch.Tensor) -> None:
            if (engine := weak()) is not None:
                engine._count_gradient(index)

        return is_there

    def _count_gradient(self, index: int) -> None:
        """Note a complete gradient of block `index`. Start averaging the blocks that have all of theirs for this step."""
        if not (self._is_last and self.average_gradients and self.mesh.replicas > 1):
            return
        self._missing[index] -= 1
        while (following := len(self.block_parameters) - 1 - len(self._averaging)) >= 0 and self._missing[
            following
        ] == 0:
            self._start_averaging(self.block_parameters[following])

    def _call_hooks_before(self, index: int, block: ModelBlock) -> None:
        """Call the block hooks before a block's training forward. Prepended, so that they run before hooks that are
        already there, which gather the block."""

        def run(module: nn.Module, inputs: tuple) -> None:
            if self._in_forward:
                for hook in self._hooks:
                    hook(index)

        block.modules[0].register_forward_pre_hook(run, prepend=True)

    @torch.no_grad()
    def _start_averaging(self, parameters: Sequence[torch.Tensor]) -> None:
        message = torch.cat([local(parameter.grad).reshape(-1) for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None  # until `step`, so that gradients are not in memory twice
        pending = self.mesh.replica_comms.all_reduce(message, "averaging gradients", self._gradient_wire)
        self._averaging.append(pending)

    def _finish_averaging(self) -> None:
        if not self._averaging:
            return
        assert len(self._averaging) == len(self.block_parameters), "a block has no gradient"
        with self.time_gradient_wait():
            for pending in self._averaging:
                pending.start_second_phase()
            for parameters, pending in zip(reversed(self.block_parameters), self._averaging, strict=True):
                mean = pending.wait().div_(self.mesh.replica_comms.size)
                parts = mean.split([local(parameter).numel() for parameter in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.grad = self._as_gradient(parameter, part)
            self._averaging.clear()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
