"""Engine for a replica on one device: nothing is sharded or gathered.

The master weights of a block are one flat tensor, and the parameters are views of it. In bf16, the parameters are views
of a second, rounded tensor, which is refreshed whenever the masters change. Each gradient is then added to its master's
gradient as soon as backward has computed it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from llmtrain.model import PREFIX, ModelBlock
from llmtrain.parallel.engine import Block
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.torch_engine import TorchEngine, views_of
from llmtrain.parallel.wrapping import named_parameters_of


class SingleDeviceEngine(TorchEngine):
    """Engine for one replica on one device. See `Engine` for the methods."""

    def __init__(self, parts: EngineParts):
        self._rounded: list[torch.Tensor | None] = []
        """Flat parameters in the compute dtype, by block; None if it is the masters' dtype."""
        super().__init__(parts)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.mesh.device)

    # -- the interface -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float) -> torch.Tensor:
        norm = super().step(lr)
        for block in self.blocks:
            self.parameters_changed(block)
        return norm

    @torch.no_grad()
    def parameters_changed(self, block: Block) -> None:
        rounded = self._rounded[self.blocks.index(block)]
        if rounded is not None:
            rounded.copy_(block.flat)

    def full_weights(self) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix(PREFIX): master.detach().to("cpu", copy=True) for name, master in self._named_masters()
        }

    # -- inside --------------------------------------------------------------------------------------------------

    def _add_block(self, index: int, block: ModelBlock) -> None:
        named = dict(named_parameters_of(self.model, block))
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in named.values()])
        shards = views_of(flat, list(named.values()))
        self.blocks.append(Block(block.name, shards, list(named), flat))
        rounded = None if self.compute_dtype == self.master_dtype else flat.to(self.compute_dtype)
        self._rounded.append(rounded)
        views = shards if rounded is None else views_of(rounded, shards)
        for parameter, view in zip(named.values(), views, strict=True):
            parameter.data = view
        masters = list(named.values()) if rounded is None else shards
        self.masters.append(masters)
        for parameter, master in zip(named.values(), masters, strict=True):
            if rounded is not None or self.mesh.replicas > 1:
                parameter.register_post_accumulate_grad_hook(self._receive_gradient(index, master))

    def _receive_gradient(self, index: int, master: torch.Tensor) -> Callable[[nn.Parameter], None]:
        """Return a hook that counts a parameter's gradient and, if its master is another tensor, adds the gradient to
        the master's."""
        is_there = self._when_gradient_is_there(index)

        def receive(parameter: nn.Parameter) -> None:
            if master is not parameter:
                gradient, parameter.grad = parameter.grad, None
                if master.grad is None:
                    master.grad = gradient.to(master.dtype)
                else:
                    master.grad += gradient
            is_there(parameter)

        return receive

    def _take_gradients(self, index: int) -> list[torch.Tensor | None]:
        gradients = [master.grad for master in self.masters[index]]
        for master in self.masters[index]:
            master.grad = None  # `step` uses the mean in its place, so that gradients are not in memory twice
        return gradients

    def _as_dtensor(self, name: str, part: torch.Tensor) -> DTensor:
        return DTensor.from_local(part, self.mesh.shard_mesh["shard"], [Shard(0)], run_check=False)
