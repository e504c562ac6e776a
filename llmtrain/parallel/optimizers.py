"""Inner optimizers, built from the recipe's `optim` section.

Their state exists from the start, although torch would create it in the first step, so that a checkpoint can be loaded
before that step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from llmtrain.config import OptimSection
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.muon import Muon, ShardedMatrix


@dataclass(frozen=True)
class TrainedPart:
    """This rank's part of a parameter, which the inner optimizer updates."""

    tensor: torch.Tensor
    shape: torch.Size
    """Shape of the full parameter."""
    in_layer: bool
    """True if the parameter belongs to a layer, False in the embedding and the head."""

    @property
    def is_orthogonalized(self) -> bool:
        """True if `optim.kind=muon` updates this parameter with Muon; AdamW updates the others."""
        return self.in_layer and len(self.shape) == 2


MOMENTS = {1: ("exp_avg", "momentum_buffer"), 2: ("exp_avg_sq",)}
"""Names of the moments of each order in the state of torch's optimizers and of Muon."""


def moments_of(
    state: Mapping[torch.Tensor, Mapping[str, torch.Tensor]], tensors: Iterable[torch.Tensor], order: int
) -> list[torch.Tensor | None]:
    """Return each tensor's first (`order` 1) or second (2) moment in an optimizer's `state`; None for a tensor without one."""
    kept = (state.get(tensor, {}) for tensor in tensors)
    return [next((of_tensor[key] for key in MOMENTS[order] if key in of_tensor), None) for of_tensor in kept]


class OptimizerSet:
    """Several optimizers, each with its own parameters, that step as one."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]):
        """Wrap `optimizers`, which must already have the state of all their parameters."""
        self._optimizers = list(optimizers)
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self.state = {tensor: kept for optimizer in self._optimizers for tensor, kept in optimizer.state.items()}

    def step(self) -> None:
        """Take every optimizer's step."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def build_sharded_optimizer(
    parts: Sequence[TrainedPart], optim: OptimSection, shard_comms: Comms
) -> torch.optim.Optimizer | OptimizerSet:
    """Return the inner optimizer, with its state, for parameters that are sharded by rows over `shard_comms`."""
    if optim.kind != "muon":
        tensors = [part.tensor for part in parts]
        optimizer = build_optimizer(decay_groups(tensors, optim.weight_decay), optim)
        start_moments(optimizer, tensors)
        return optimizer
    matrices = [ShardedMatrix(part.tensor, part.shape) for part in parts if part.is_orthogonalized]
    others = [part.tensor for part in parts if not part.is_orthogonalized]
    muon = Muon(matrices, optim.lr, optim.weight_decay, optim.muon, shard_comms)
    adamw = build_optimizer(decay_groups(others, optim.weight_decay), optim)
    start_moments(adamw, others)
    for group in adamw.param_groups:
        group["lr_ratio"] = optim.muon.adamw_lr_ratio
    return OptimizerSet([muon, adamw])


def build_optimizer(groups: list[dict], optim: OptimSection) -> torch.optim.Optimizer:
    """Return plain SGD, or fused AdamW for every other kind, over parameter groups that already have their weight decay."""
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def set_lr(optimizer: torch.optim.Optimizer | OptimizerSet, lr: float) -> None:
    """Set the learning rate of all parameter groups for the next step: `lr` times the group's `lr_ratio`, if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def step_unless(skipped: torch.Tensor, optimizer: torch.optim.Optimizer | OptimizerSet) -> None:
    """Take the optimizer's step if `skipped`, a scalar on the device, is 0. Otherwise leave parameters and state unchanged.

    Fused AdamW decides on the device, by the attribute `found_inf` that torch's gradient scalers set. For other optimizers, the host
    waits for the device."""
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.found_inf = skipped.float()
        optimizer.step()
    elif not skipped:
        optimizer.step()


def start_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Create the state that AdamW itself would create in its first step. Do nothing for other optimizers."""
    if isinstance(optimizer, torch.optim.AdamW):
        for parameter in parameters:
            zeros = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}


def decay_groups(parameters: Iterable[torch.Tensor], weight_decay: float) -> list[dict]:
    """Return an optimizer's parameter groups, with weight decay on matrices only."""
    parameters = list(parameters)
    matrices = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay}
    vectors = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]
