"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized, for replicas whose matrices may be sharded by rows.

Rule      b <- momentum b + (1 - momentum) g; u = momentum b + (1 - momentum) g (Nesterov); w <- (1 - lr decay) w - lr s O(u).
          O replaces all singular values of u by values near 1, with Newton-Schulz iterations that start at u / ||u||:
          x <- a x + (b x x' + c (x x')^2) x. The factor s depends on the matrix's shape, so that one learning rate suits all.
Traffic   nothing between replicas. In a replica of n ranks, the rows of a matrix go to one rank, and those of the result come
          back: 2 (n-1)/n x 2 bytes per value from all ranks together (in bf16).
Memory    one momentum: 4 bytes per value, half of AdamW's.
Differs   iterations are in bf16 on GPUs, as published and as in torch.optim.Muon, which does the same on one rank; on CPUs they
          are in fp32, and in fp64 if parameters are.
Needs     equal devices for sync.method=synchronous. Different devices round matrix products differently, so replicas drift apart
          although their gradients are equal. After a synchronous warm-up, all replicas continue with the first one's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmtrain.config import MuonSection
from llmtrain.parallel.collectives import PendingCollective
from llmtrain.parallel.comms import Comms

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of the iteration. They raise small singular values fast, and leave most between 0.7 and 1.2."""
LEAST_NORM = 1e-7
"""Lower bound of the norm by which a matrix is divided, for matrices of zeros."""
PRECISION = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPE_FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factor s as a function of a matrix's (rows, columns), by torch.optim.Muon's name for it (`adjust_lr_fn`)."""


def orthogonalize(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return a matrix of the same shape with the singular vectors of `matrix` and singular values near 1, computed by
    Newton-Schulz iterations in its dtype. `matrix` is overwritten."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.div_(torch.linalg.vector_norm(matrix).clamp(min=LEAST_NORM))
    for _ in range(iterations):
        # For a tall matrix, the products of its transpose are computed, without a transposed copy.
        gram = x.T @ x if is_tall else x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, x, update, beta=a) if is_tall else torch.addmm(x, update, x, beta=a)
    return x


def orthogonalization_flops(rows: int, columns: int, iterations: int) -> int:
    """Return the number of floating-point operations in the matrix products of `orthogonalize`."""
    short, long = sorted((rows, columns))
    return iterations * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True)
class ShardedMatrix:
    """Matrix of the model, of which this rank has some rows."""

    rows: torch.Tensor
    """This rank's rows, which the optimizer updates."""
    shape: torch.Size
    """Shape of the full matrix."""


class Muon(torch.optim.Optimizer):
    """Optimizer of matrices that are sharded by rows over `shard_comms`, as FSDP2 shards them.

    Each matrix is orthogonalized by one rank, which first gathers all rows of the matrix and afterwards returns them. A
    batch has one matrix per rank. While the ranks work on a batch, the rows of the next batch are gathered and those of
    the previous one returned. `step` is a collective of the shard group.
    """

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        lr: float,
        weight_decay: float,
        section: MuonSection,
        shard_comms: Comms,
    ):
        # Sorted, so that a batch has matrices of similar shapes and the ranks have equal work.
        self._matrices = sorted(matrices, key=lambda matrix: (matrix.shape.numel(), *matrix.shape), reverse=True)
        self._section, self._shard_comms = section, shard_comms
        super().__init__([matrix.rows for matrix in matrices], {"lr": lr, "weight_decay": weight_decay})
        for matrix in matrices:  # before the first step, so that a checkpoint can be loaded
            self.state[matrix.rows]["momentum_buffer"] = torch.zeros_like(matrix.rows, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all matrices that have a gradient."""
        present = [matrix for matrix in self._matrices if matrix.rows.grad is not None]
        size = self._shard_comms.size
        batches = [present[first : first + size] for first in range(0, len(present), size)]
        # At most two gathers and two returns are in flight. All ranks start them in this order.
        gathering = [self._start_gather(batch) for batch in batches[:1]]
        returning: list[tuple[Sequence[ShardedMatrix], PendingCollective]] = []
        for number, batch in enumerate(batches):
            gathering += [self._start_gather(following) for following in batches[number + 1 : number + 2]]
            returning.append((batch, self._start_return(batch, gathering.pop(0).wait())))
            if number > 0:
                self._update(*returning.pop(0))
        for batch, pending in returning:
            self._update(batch, pending)

    def _start_gather(self, batch: Sequence[ShardedMatrix]) -> PendingCollective:
        """Update the momenta of a batch, and start sending this rank's rows of each matrix to the rank that orthogonalizes it."""
        parts = [self._update_momentum(matrix).reshape(-1) for matrix in batch]
        parts += [parts[0].new_empty(0)] * (self._shard_comms.size - len(batch))
        return self._shard_comms.start_all_to_all(
            parts, self._values_by_rank(self._own_of(batch)), "gathering matrices for Muon"
        )

    def _start_return(self, batch: Sequence[ShardedMatrix], gathered: torch.Tensor) -> PendingCollective:
        """Orthogonalize this rank's matrix of the batch, if it has one, and start sending every rank its rows of the result."""
        own = self._own_of(batch)
        if own is not None:
            matrix = gathered.to(own.rows.device).view(own.shape)
            gathered = orthogonalize(matrix, self._section.iterations).reshape(-1)
        received = [matrix.rows.numel() for matrix in batch] + [0] * (self._shard_comms.size - len(batch))
        return self._shard_comms.start_all_to_all(
            gathered.split(self._values_by_rank(own)), received, "returning matrices of Muon"
        )

    def _own_of(self, batch: Sequence[ShardedMatrix]) -> ShardedMatrix | None:
        """Return the matrix of a batch that this rank orthogonalizes; None if the batch has no matrix for this rank."""
        return batch[self._shard_comms.rank] if self._shard_comms.rank < len(batch) else None

    def _update(self, batch: Sequence[ShardedMatrix], pending: PendingCollective) -> None:
        group = self.param_groups[0]
        lr, factor = group["lr"], SHAPE_FACTORS[self._section.adjust_lr]
        updates = pending.wait().to(batch[0].rows.device).split([matrix.rows.numel() for matrix in batch])
        for matrix, update in zip(batch, updates, strict=True):
            matrix.rows.mul_(1 - lr * group["weight_decay"])
            matrix.rows.add_(update.view(matrix.rows.shape), alpha=-lr * factor(*matrix.shape))

    def _update_momentum(self, matrix: ShardedMatrix) -> torch.Tensor:
        """Add the gradient to the momentum, and return this rank's rows of the update to orthogonalize, u, in the dtype of the
        iterations."""
        gradient, momentum = matrix.rows.grad, self.state[matrix.rows]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - self._section.momentum)
        direction = gradient.lerp(momentum, self._section.momentum)
        if direction.dtype == torch.float64:
            return direction
        chosen = self._section.precision
        return direction.to(PRECISION[("bf16" if direction.is_cuda else "fp32") if chosen == "auto" else chosen])

    def _values_by_rank(self, matrix: ShardedMatrix | None) -> list[int]:
        """Return the number of values of a matrix on each rank, 0 for None. FSDP2 divides rows as torch.chunk does."""
        size = self._shard_comms.size
        if matrix is None:
            return [0] * size
        rows, columns = matrix.shape
        each = -(-rows // size)
        return [max(0, min(each, rows - rank * each)) * columns for rank in range(size)]
