"""Replica made of a user's module and optimizer: its blocks for synchronization, and checks of the module and the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from llmtrain.errors import RecipeError
from llmtrain.parallel.engine import Block, Replica
from llmtrain.parallel.optimizers import moments_of
from llmtrain.parallel.sharded import local, release_gathered
from llmtrain.sync.anchors import INTEGERS


class ModuleReplica(Replica):
    """Replica that consists of a module, or this rank's shards of it, and the optimizer that trains it.

    Each layer is a block. The parameters outside the layers form the first block, "rest". Blocks hold only trainable parameters of
    the optimizer. A layer without such parameters has no block.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer):
        """Raise RecipeError if the optimizer trains none of the module's parameters, if a layer is not a part of the module, if
        parameters are complex, or if they are on several devices."""
        layers = list(layers)
        names = {parameter: name for name, parameter in model.named_parameters()}
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        seen = {parameter for parameter in names if parameter not in trained}
        if any(parameter not in names for layer in layers for parameter in layer.parameters()):
            raise RecipeError(
                "layers contains a module that is not a part of the model; give submodules of the model that is synchronized"
            )
        of_layers = [(f"layer {i}", layer, _take(layer, seen)) for i, layer in enumerate(layers)]
        units = [unit for unit in [("rest", model, _take(model, seen)), *of_layers] if unit[2]]
        if not units:
            raise RecipeError(
                "the optimizer has no trainable parameters of the module, so there is nothing to synchronize"
            )
        self.blocks = [
            Block(name, [local(parameter.detach()) for parameter in unit], [names[parameter] for parameter in unit])
            for name, _, unit in units
        ]
        self._modules = [module for _, module, _ in units]
        self._model, self._optimizer = model, optimizer
        self._units = [unit for _, _, unit in units]
        self.parameters = [parameter for unit in self._units for parameter in unit]
        """Parameters of all blocks, in an order that is the same on all ranks."""
        if (complex_one := next((p for p in self.parameters if p.is_complex()), None)) is not None:
            raise RecipeError(
                f"{names[complex_one]} is complex, expected a real parameter; make its torch.view_as_real the parameter"
            )
        self._synchronized = set(self.parameters)
        self._handles: list[RemovableHandle] = []
        devices = {str(shard.device) for block in self.blocks for shard in block.shards}
        if len(devices) > 1:
            raise RecipeError(
                f"the parameters are on {', '.join(sorted(devices))}; a replica's must be on one device per rank"
            )

    def check_parameters(self) -> None:
        """Raise RecipeError if a parameter of a block was frozen after construction, or if the optimizer has a trainable parameter in
        no block, because it was added or unfrozen later or is not the module's. All ranks come to the same result."""
        if not all(parameter.requires_grad for parameter in self.parameters):
            raise RecipeError(
                "a parameter was frozen after LocalUpdates was constructed, and outer steps would still move it; call finish, and "
                "construct LocalUpdates anew"
            )
        groups = self._optimizer.param_groups
        others = (p for group in groups for p in group["params"] if p.requires_grad and p not in self._synchronized)
        if next(others, None) is not None:
            raise RecipeError(
                "the optimizer has a trainable parameter that is not synchronized: it is not the module's, or was added or unfrozen "
                "later; call finish, and construct LocalUpdates anew"
            )

    def check_storage(self) -> None:
        """Raise RecipeError if a parameter's memory has changed since construction, for example after `model.to`."""
        for block, unit in zip(self.blocks, self._units, strict=True):
            for parameter, shard in zip(unit, block.shards, strict=True):
                if local(parameter.detach()).data_ptr() != shard.data_ptr():
                    raise RecipeError(
                        f"the parameters of {block.name} have moved since LocalUpdates was constructed; move or convert the module first"
                    )

    def fingerprint(self) -> torch.Tensor:
        """Return a checksum of the bits of this rank's shards for each block: [blocks], int64, on the CPU."""
        return torch.stack([_checksum(block.shards) for block in self.blocks])

    def fingerprint_without(self, trained: Set[nn.Parameter]) -> torch.Tensor:
        """Return a checksum of the bits of this rank's shards of the module's parameters that are neither in a block nor in
        `trained`: a scalar, int64, on the CPU. Parameters on another device or in tensor classes of their own, such as those of a
        quantized model, are left out."""
        release_gathered(self._model)  # after an evaluation, or this rank might compare whole parameters with shards
        others = [p for p in self._model.parameters() if p not in self._synchronized and p not in trained]
        shards, device = [local(parameter.detach()) for parameter in others], self.blocks[0].shards[0].device
        return _checksum([shard for shard in shards if type(shard) is torch.Tensor and shard.device == device])

    def fingerprint_of_moments(self) -> torch.Tensor:
        """Return a checksum of the bits of the optimizer's first and second moments for each block: [blocks], int64, on the CPU."""
        both = [self.moments(index, 1) + self.moments(index, 2) for index in range(len(self.blocks))]
        # Moments that an optimizer packs into its own tensor classes, or into bytes, are not compared.
        plain = [[m for m in of_block if type(m) is torch.Tensor and m.element_size() in INTEGERS] for of_block in both]
        return torch.stack([_checksum(moments) for moments in plain])

    def register_block_hook(self, hook: Callable[[int], None]) -> None:
        # torch.compile would otherwise trace the communication, which is slow and has no benefit.
        untraced = torch.compiler.disable(hook)

        def before(index: int) -> Callable[[nn.Module, Any], None]:
            return lambda module, inputs: untraced(index) if module.training and torch.is_grad_enabled() else None

        for index, module in enumerate(self._modules):
            self._handles.append(module.register_forward_pre_hook(before(index), prepend=True))

    def remove_block_hooks(self) -> None:
        """Remove the hooks of `register_block_hook`, which would keep anchors in memory and synchronize in the next forward."""
        while self._handles:
            self._handles.pop().remove()

    def parameters_changed(self, block: Block) -> None:
        """Release the parameters that FSDP2 gathered before the change. After a forward without backward, FSDP2 keeps the root
        module's parameters gathered, which may belong to any block."""
        release_gathered(self._model)

    def moments(self, index: int, order: int) -> list[torch.Tensor | None]:
        moments = moments_of(self._optimizer.state, self._units[index], order)
        return [None if moment is None else local(moment.detach()) for moment in moments]


def layers_of(model: nn.Module) -> Sequence[nn.Module]:
    """Return the elements of the module's longest ModuleList or Sequential."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    return max(lists, key=len, default=nn.ModuleList())


def _take(module: nn.Module, seen: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return a module's trainable parameters that are not in `seen`, and add them to `seen`, so that shared parameters are taken
    once."""
    taken = [parameter for parameter in module.parameters() if parameter.requires_grad and parameter not in seen]
    seen.update(taken)
    return taken


def _checksum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the bits of tensors, read as integers: of bytes, if no integer has the size of an element."""
    flats = [tensor.contiguous().view(-1) for tensor in tensors]
    sums = [flat.view(INTEGERS.get(flat.element_size(), torch.uint8)).sum(dtype=torch.int64) for flat in flats]
    return torch.stack(sums).sum().cpu() if sums else torch.zeros((), dtype=torch.int64, device="cpu")
