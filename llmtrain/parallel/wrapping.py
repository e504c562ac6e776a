"""Preparation of a model's layers for every engine: activation checkpointing, torch.compile, and the head's loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmtrain.compiling import compiled
from llmtrain.config import ParallelSection
from llmtrain.loss import LossHead
from llmtrain.model import LanguageModel, ModelBlock

COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
"""Dtype of forward and backward, by `parallel.precision`."""
EXPENSIVE = {"mm", "addmm", "bmm"}
"""Operations (matrix products) whose results selective checkpointing keeps, in addition to fused attention."""
ATTENTION = "_scaled_dot_product"
"""Prefix of the names of torch's fused attention operations."""


def named_parameters_of(model: LanguageModel, block: ModelBlock) -> list[tuple[str, nn.Parameter]]:
    """Return a block's parameters with their full names in the model, listing shared ones once."""
    inside = {id(module) for top in block.modules for module in top.modules()}
    owners = {id(p) for m in model.modules() if id(m) in inside for p in m.parameters(recurse=False)}
    return [(name, p) for name, p in model.named_parameters() if id(p) in owners]


def wrap_layers(blocks: Sequence[ModelBlock], parallel: ParallelSection, lengths_vary: bool = False) -> None:
    """Wrap every layer's forward in activation checkpointing, and the result in torch.compile, if the recipe asks for these.
    Choose the head's loss. Module hooks stay outside both, so they run once per forward.

    If the lengths of micro-batches vary, layers are compiled for all lengths at once. Static kernels would be compiled
    again for each length, up to torch's limit of eight.
    """
    for layer in (m for block in blocks if block.is_layer for m in block.modules):
        forward = layer.forward
        if parallel.activation_checkpointing:
            forward = _checkpointed(forward, selective=parallel.activation_checkpointing == "selective")
        if parallel.compile:
            forward = compiled(forward, dynamic=lengths_vary)  # dynamic kernels fit all lengths, but are slower
        if forward != layer.forward:  # not `is not`: each access makes a new bound method
            layer.forward = forward
    for head in (m for block in blocks for m in block.modules if isinstance(m, LossHead)):
        head.choose(parallel.loss_kernel, parallel.compile, dynamic=lengths_vary)


def _checkpointed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    keeps = {"context_fn": partial(create_selective_checkpoint_contexts, _checkpoint_policy)} if selective else {}

    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **keeps, **kwargs)

    return recomputing


def _checkpoint_policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__
    # Attention with dropout is recomputed: if its result were kept, the random numbers would not advance in the
    # recomputation, and later dropouts of the layer would draw other masks than in the forward pass.
    is_expensive = name in EXPENSIVE or (name.startswith(ATTENTION) and not _has_dropout(args, kwargs))
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an attention operation has dropout, given its arguments. Dropout is the only positional argument
    that is a float."""
    return any(isinstance(argument, float) and argument > 0 for argument in (*args, kwargs.get("dropout_p")))
