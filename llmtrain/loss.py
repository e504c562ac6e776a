"""Cross-entropy of a linear head without ever holding tokens x vocabulary logits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.errors import ModelError

IGNORE_INDEX = -100
"""Label of a position that does not count."""
SummedLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""hidden [..., d], weight [V, d], bias [V] or None, labels [...] -> a scalar."""


def _loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, wide: torch.dtype, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[P, V] logits, which may be overwritten, and [P] labels -> summed loss and its gradient by the logits."""
    narrow, logits = logits.dtype, logits.to(wide)
    counts = labels != IGNORE_INDEX
    target = labels.masked_fill(~counts, 0)[:, None]
    log_total = logits.logsumexp(dim=-1)
    loss = (log_total - logits.gather(1, target)[:, 0]).masked_fill(~counts, 0).sum()
    if not needs_grad:
        return loss, None
    # Softmax, in the logits' own memory, of rows that count; of the others 0. What is taken from the target's is so, too.
    softmax = logits.sub_(log_total.masked_fill(~counts, torch.inf)[:, None]).exp_()
    softmax.scatter_add_(1, target, -counts.to(wide)[:, None])
    return loss, softmax.to(narrow)


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    return torch.compile(_loss_and_gradient, dynamic=False)  # a whole chunk, and what is left over


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed loss and, while a chunk's logits exist, its share of both gradients: no recomputation in backward.

    hidden [P, d], weight [V, d], bias [V] or None, labels [P].
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk, compiled):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_grad = any(ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_grad and bias is not None else None
        # Validation, which needs no gradient, is not worth another compilation.
        loss_and_gradient = _compiled() if compiled and needs_grad else _loss_and_gradient
        for start in range(0, hidden.shape[0], chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk]
            summed, grad = loss_and_gradient(F.linear(h, weight, bias), y, wide, needs_grad)
            loss += summed
            if needs_grad:
                torch.mm(grad, weight, out=grad_hidden[start : start + chunk])
                grad_weight += grad.T @ h
                if bias is not None:
                    grad_bias += grad.sum(0)
            del grad  # as large as logits, which would be beside it in the next chunk
        if needs_grad:
            ctx.save_for_backward(
                grad_hidden, grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype)
            )
        return loss

    @staticmethod
    def backward(ctx, upstream):
        # In place: most of a step's memory is in use now. A second backward pass would be told so.
        scaled = (None if grad is None else grad.mul_(upstream.to(grad.dtype)) for grad in ctx.saved_tensors)
        return *scaled, None, None, None


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk: int,
    compiled: bool = False,
) -> torch.Tensor:
    """Sum over positions of -log softmax(hidden @ weight.T + bias)[label], in at least fp32.

    hidden [..., d], weight [V, d], labels [...] with `IGNORE_INDEX` where a position does not count; at most `chunk`
    rows of logits exist at once. `compiled`: what is done to them between matrix products is, in fewer passes.
    """
    return _ChunkedCrossEntropy.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), chunk, compiled
    )


def liger_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """The same by liger-kernel's Triton kernels (https://github.com/linkedin/Liger-Kernel), which choose their own chunks and
    read one number a call from the device. Gradients are summed in at least fp32, as ours are."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    flat = hidden.reshape(-1, hidden.shape[-1])
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return liger_fused_linear_cross_entropy(
        flat, weight, labels.reshape(-1), bias, ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=wide
    )


def summed_loss(kernel: str, chunk: int, compiled: bool) -> SummedLoss:
    """The loss that `parallel.loss_kernel` names. Raises ModelError if it can't be computed here."""
    if kernel == "torch":
        return partial(summed_cross_entropy, chunk=chunk, compiled=compiled)
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "parallel.loss_kernel is liger, but liger-kernel is not installed; pip install liger-kernel, or use torch"
        )
    if not torch.cuda.is_available():
        raise ModelError("parallel.loss_kernel is liger, which needs a GPU, and there is none; use torch")
    return liger_cross_entropy


class LossHead(nn.Linear):
    """An output head that returns the summed loss for (hidden, labels), and logits for hidden alone."""

    chunk: int = 1024

    @classmethod
    def from_linear(cls, linear: nn.Linear, chunk: int) -> LossHead:
        """The same weights in a LossHead."""
        with torch.device("meta"):
            head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        head.weight, head.bias, head.chunk = linear.weight, linear.bias, chunk
        head.choose("torch", compiled=False)
        return head

    def choose(self, kernel: str, compiled: bool) -> None:
        """What computes the loss; see `summed_loss`."""
        self._summed_loss = summed_loss(kernel, self.chunk, compiled)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return super().forward(hidden)
        return self._summed_loss(hidden, self.weight, self.bias, labels)
