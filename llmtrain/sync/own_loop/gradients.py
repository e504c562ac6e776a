"""Means of gradients over the replicas, in the synchronous steps of a user's own loop."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from llmtrain.errors import RecipeError
from llmtrain.parallel.comms import AnyFormat, Comms
from llmtrain.parallel.sharded import local
from llmtrain.sync.own_loop.equal_replicas import check_equal_steps

BUCKET_BYTES = 25 * 2**20
"""Size limit of a message with several gradients, as in DistributedDataParallel. Every message costs the network's latency once."""


def average_gradients(
    replicas: Comms, parameters: Sequence[nn.Parameter], steps: int, wire: AnyFormat | None = None
) -> None:
    """Replace each gradient with its mean over the replicas, before optimizer step `steps`. A replica without a gradient for a
    parameter that another replica has used contributes 0. A collective of the replica group; the parameters must have the same
    order on all ranks.

    Raises TrainingError if replicas have taken different numbers of steps, and RecipeError for sparse gradients."""
    if replicas.size == 1:
        return
    # By parameter: 0 without a gradient, 1 for a dense gradient, 2 for a sparse one.
    kinds = torch.tensor(
        [0 if p.grad is None else 1 + p.grad.is_sparse for p in parameters], dtype=torch.uint8, device="cpu"
    )
    found = kinds[None]
    if not check_equal_steps(replicas, steps, zlib.crc32(kinds.numpy().tobytes())):
        found = replicas.all_gather(kinds.to(replicas.device), "comparing which parameters have gradients")
    if (found == 2).any():
        raise RecipeError("synchronous steps cannot average sparse gradients; use sparse=False, or warmup_steps=0")
    gradients = [_gradient_of(p) for p, is_used in zip(parameters, found.any(0).tolist(), strict=True) if is_used]
    pending = []  # start all messages at once, so that they do not wait for the network's latency one after another
    for bucket in buckets(gradients):
        share = torch.cat([gradient.reshape(-1) for gradient in bucket]) / replicas.size
        pending.append((bucket, replicas.start_all_reduce(share, "averaging gradients", wire)))
    for bucket, message in pending:
        means = message.wait().split([gradient.numel() for gradient in bucket])
        for gradient, mean in zip(bucket, means, strict=True):
            gradient.copy_(mean.view(gradient.shape))


def _gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a parameter's gradient. Set the gradient to 0 if the parameter has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad.detach())


def buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients of each message: consecutive gradients of one dtype that fit in BUCKET_BYTES together, or a single larger
    one."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and (size + gradient.nbytes > BUCKET_BYTES or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
