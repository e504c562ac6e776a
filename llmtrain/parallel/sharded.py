"""This rank's parts of tensors that FSDP2 has sharded. The module imports only torch, because a user's own loop may
train a model that is not from transformers."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def uses_fsdp1(module: torch.nn.Module) -> bool:
    """Return whether any part of the module is sharded with FSDP1, whose flat parameters are not DTensors."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def release_gathered(module: torch.nn.Module) -> None:
    """Release the parameters that FSDP2 keeps gathered in a module, so that the next forward gathers them anew. Do
    nothing without FSDP2."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
