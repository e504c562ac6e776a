"""FSDP2 engine: every block is sharded over the shard axis, through torch's public API only.

Gradients are reduce-scattered in every micro-batch, so a rank never accumulates more than its own part of them. The
reduction overlaps with backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from llmtrain.loss import LossHead
from llmtrain.model import ModelBlock
from llmtrain.parallel.engine import Block
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.sharded import local
from llmtrain.parallel.torch_engine import TorchEngine
from llmtrain.parallel.wrapping import named_parameters_of


class Fsdp2Engine(TorchEngine):
    """Engine for one replica under FSDP2. See `Engine` for the methods."""

    def __init__(self, parts: EngineParts):
        self._units: list[FSDPModule] = []
        self._parameters: dict[str, DTensor] = {}
        """FSDP's parameters by name. The masters are this rank's local parts of these, so that the optimizer works
        without DTensor's dispatch."""
        # An undecided `auto` is true, which needs less memory.
        self._reshard_after_forward = bool(parts.parallel.reshard_after_forward)
        super().__init__(parts)
        fully_shard(self.model, mesh=self.mesh.shard_mesh["shard"], mp_policy=self._precision())

    # -- the interface -------------------------------------------------------------------------------------------

    def parameters_changed(self, block: Block) -> None:
        unit = self._units[self.blocks.index(block)]
        unit.reshard()  # parameters gathered before the change are stale
        if self._in_forward and self.mesh.device.type == "cuda":
            # FSDP's all-gather streams wait for the current stream only at the root's forward, which was before this
            # change. An all-gather on the current stream sees the change, and FSDP then finds the block already gathered.
            unit.unshard(async_op=True)

    @contextmanager
    def eval_mode(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        with super().eval_mode() as summed_loss:
            try:
                yield summed_loss
            finally:
                for unit in self._units:
                    unit.reshard()  # the head is still gathered, because no backward pass followed

    @torch.no_grad()
    def full_weights(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, parameter in self.model.causal_lm.named_parameters():
            whole = parameter.full_tensor()  # one at a time, so that the other ranks never have two in memory
            if self.mesh.shard_comms.rank == 0:
                weights[name] = whole.cpu()
        return weights

    # -- inside --------------------------------------------------------------------------------------------------

    def _add_block(self, index: int, block: ModelBlock) -> None:
        modules = block.modules if len(block.modules) > 1 else block.modules[0]
        # The head stays gathered after forward, because backward begins with it and would gather it again at once.
        has_head = any(isinstance(module, LossHead) for module in block.modules)
        reshards = self._reshard_after_forward and not has_head
        shard = self.mesh.shard_mesh["shard"]
        fully_shard(modules, mesh=shard, mp_policy=self._precision(), reshard_after_forward=reshards)
        unit = cast(FSDPModule, block.modules[0])
        if self.mesh.shard_comms.size > 1:  # on a single rank, FSDP would divide the gradients by 1 in a separate pass
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._units.append(unit)
        named = {name: cast(DTensor, p) for name, p in named_parameters_of(self.model, block)}
        self._parameters |= named
        self.masters.append([local(p.detach()) for p in named.values()])
        self.blocks.append(Block(block.name, self.masters[-1], list(named)))
        if self.mesh.replicas > 1:
            for parameter in named.values():  # hooks run after every reduce-scatter
                parameter.register_post_accumulate_grad_hook(self._when_gradient_is_there(index))

    def _precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=self.master_dtype)

    def _take_gradients(self, index: int) -> list[torch.Tensor | None]:
        parameters = [self._parameters[name] for name in self.blocks[index].parameter_names]
        gradients = [None if p.grad is None else local(p.grad) for p in parameters]
        for parameter in parameters:
            parameter.grad = None  # FSDP would add the next step's to it
        return gradients

    def _as_dtensor(self, name: str, part: torch.Tensor) -> DTensor:
        like = self._parameters[name]
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
