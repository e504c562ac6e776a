"""FSDP2 engine: every block is sharded over the shard axis, with torch's public API alone.

Every micro-batch reduces its gradients, so that a rank holds no more than its part of them. The reduction is hidden behind
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from llmtrain.config import ParallelSection
from llmtrain.loss import LossHead
from llmtrain.model import LanguageModel, ModelBlock
from llmtrain.parallel.engine import Block
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.torch_engine import TorchEngine, local
from llmtrain.parallel.wrapping import named_parameters_of


class Fsdp2Engine(TorchEngine):
    """Engine for one replica under FSDP2. See `Engine` for the methods."""

    def __init__(self, model: LanguageModel, mesh: Mesh, parallel: ParallelSection, *arguments: Any, **keywords: Any):
        """Build the engine; see `TorchEngine` for the other arguments."""
        self._units: list[FSDPModule] = []
        self._reshards = bool(parallel.reshard_after_forward)  # `auto` that nobody has decided needs the least memory
        super().__init__(model, mesh, parallel, *arguments, **keywords)
        fully_shard(model, mesh=mesh.devices["shard"], mp_policy=self._precision())

    # -- the interface -------------------------------------------------------------------------------------------

    def parameters_changed(self, block: Block) -> None:
        unit = self._units[self.blocks.index(block)]
        unit.reshard()  # parameters gathered before the change are stale
        if self._in_forward and self.mesh.device.type == "cuda":
            # FSDP's all-gather streams waited for the current stream only at the root's forward, before the change. An
            # all-gather on the current stream sees the change, and FSDP then finds the block already gathered.
            unit.unshard(async_op=True)

    @contextmanager
    def eval_mode(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        with super().eval_mode() as summed_loss:
            try:
                yield summed_loss
            finally:
                for unit in self._units:
                    unit.reshard()  # the head is still gathered, because no backward pass followed

    def state_dict(self) -> dict[str, torch.Tensor]:
        weights = {f"weights.{name}": p.detach() for name, p in self.model.named_parameters()}
        optimizer = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return weights | {
            f"optimizer.{name}.{key}": value for name, slot in optimizer.items() for key, value in slot.items()
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[f"weights.{name}"])
        whole = get_optimizer_state_dict(self.model, self.optimizer)
        whole["state"] = {
            name: {key: state[f"optimizer.{name}.{key}"] for key in slot} for name, slot in whole["state"].items()
        }
        set_optimizer_state_dict(self.model, self.optimizer, whole)
        for unit in self._units:
            unit.reshard()

    def to_dtensors(self, block: Block, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        parameters = self.block_parameters[self.blocks.index(block)]
        parts = flat.split([shard.numel() for shard in block.shards])
        return dict(zip(block.parameter_names, map(_like, parameters, parts), strict=True))

    def from_dtensors(self, block: Block, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([named[name].to_local().reshape(-1) for name in block.parameter_names])

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
        # Backward begins with the head, which would be gathered again at once.
        has_head = any(isinstance(module, LossHead) for module in block.modules)
        reshards = self._reshards and not has_head
        shard = self.mesh.devices["shard"]
        fully_shard(modules, mesh=shard, mp_policy=self._precision(), reshard_after_forward=reshards)
        unit = cast(FSDPModule, block.modules[0])
        if self.mesh.shard_comms.size > 1:  # a single rank would divide by it in a separate pass
            unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._units.append(unit)
        named = dict(named_parameters_of(self.model, block))
        self.block_parameters.append(list(named.values()))
        self.blocks.append(Block(block.name, [local(p.detach()) for p in named.values()], list(named)))
        for parameter in named.values() if self.mesh.replicas > 1 else ():  # called after every reduce-scatter
            parameter.register_post_accumulate_grad_hook(self._when_gradient_is_there(index))

    def _precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=self.master_dtype)

    def _as_gradient(self, parameter: torch.Tensor, flat: torch.Tensor) -> DTensor:
        return _like(parameter, flat)


def _like(parameter: torch.Tensor, flat: torch.Tensor) -> DTensor:
    """Return a flat tensor as a DTensor that is sharded like a parameter."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        flat.view(parameter.to_local().shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
