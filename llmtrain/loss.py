"""Cross-entropy of a linear head without the full tokens x vocabulary logits in memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from llmtrain.compiling import compiled
from llmtrain.errors import ModelError

IGNORE_INDEX = -100
"""Label of a position that is excluded from the loss."""
ROW_MULTIPLE = 64
"""Alignment, in values, of the rows of logits on a GPU. Products of bf16 matrices are slow on GPUs if the row pitch is
not a multiple of 8 values, as with GPT-2's 50,257 tokens."""
SummedLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
"""(hidden [..., d], weight [V, d], bias [V] or None, labels [...]) -> summed loss, a scalar."""


def inputs_and_labels(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels, each [B, T], of token ids [B, T + 1] that are padded on the right with `IGNORE_INDEX`.

    Padded inputs become token 0. That changes nothing, because no other token sees them under causal attention, and their
    labels are ignored.
    """
    return ids[:, :-1].clamp(min=0), ids[:, 1:]


def _loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, wide: torch.dtype, needs_grad: bool) -> torch.Tensor:
    """Return the summed loss of logits [P, V] and labels [P], computed in the dtype `wide`. With `needs_grad`, overwrite the
    logits with the loss's gradient with respect to them."""
    wider = logits.to(wide)
    counts = labels != IGNORE_INDEX
    target = labels.masked_fill(~counts, 0)[:, None]
    softmax = wider.softmax(dim=-1)
    # Computes logsumexp from the softmax, so that exp is computed once. The largest probability is at least 1 / V, so its
    # logarithm is exact enough.
    log_total = wider.amax(dim=-1) - softmax.amax(dim=-1).log()
    loss = (log_total - wider.gather(1, target)[:, 0]).masked_fill(~counts, 0).sum()
    if needs_grad:
        softmax.scatter_add_(1, target, torch.full_like(target, -1, dtype=wide))
        if torch.compiler.is_compiling():  # an `out` with gaps between its rows would break the graph
            logits.copy_(softmax.mul_(counts.to(wide)[:, None]))
        else:
            torch.mul(softmax, counts.to(wide)[:, None], out=logits)
    return loss


def _room_for_logits(hidden: torch.Tensor, vocabulary: int, chunk: int) -> torch.Tensor | None:
    """Return memory for the logits of one chunk, with rows that begin at multiples of ROW_MULTIPLE values; None on a CPU."""
    if not hidden.is_cuda:
        return None
    return hidden.new_empty(min(chunk, len(hidden)), -(-vocabulary // ROW_MULTIPLE) * ROW_MULTIPLE)


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, room: torch.Tensor | None
) -> torch.Tensor:
    """Return the logits [P, V] of hidden [P, d], in `room` if it is given."""
    if room is None:
        return F.linear(hidden, weight, bias)
    logits = room[: len(hidden), : len(weight)]
    if bias is None:
        return torch.mm(hidden, weight.T, out=logits)
    return torch.addmm(bias, hidden, weight.T, out=logits)


@cache
def _compiled(dynamic: bool) -> Callable[..., torch.Tensor]:
    # Without `dynamic`, the function is compiled for two shapes, a full chunk and the remainder, or for more if batches
    # differ in length.
    return compiled(_loss_and_gradient, dynamic=dynamic)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed loss whose forward also computes the gradients, chunk by chunk, while the logits of each chunk exist.

    Backward only scales them. Shapes: hidden [P, d], weight [V, d], bias [V] or None, labels [P].
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk, compiled, dynamic, needs_grad):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_grad and bias is not None else None
        # Without gradients, as in validation, the gain is not worth another compilation.
        loss_and_gradient = _compiled(dynamic) if compiled and needs_grad else _loss_and_gradient
        room = _room_for_logits(hidden, len(weight), chunk)
        for start in range(0, hidden.shape[0], chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk]
            logits = _logits(h, weight, bias, room)
            loss += loss_and_gradient(logits, y, wide, needs_grad)
            if needs_grad:
                gradient = logits
                torch.mm(gradient, weight, out=grad_hidden[start : start + chunk])
                if wide == weight.dtype:
                    grad_weight.addmm_(gradient.T, h)
                else:
                    grad_weight += gradient.T @ h
                if bias is not None:
                    grad_bias += gradient.sum(0)
                del gradient
            del logits  # before the next chunk's logits, which are as large, are allocated
        del room
        if needs_grad:
            ctx.save_for_backward(
                grad_hidden, grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype)
            )
        return loss

    @staticmethod
    def backward(ctx, upstream):
        # In place, because memory use is near its peak now. A second backward would scale twice, but torch does not allow it.
        # A factor with a dimension keeps its precision, where a 0-dimensional one would be rounded to the gradient's.
        factor = upstream.view(1)
        scaled = (None if grad is None else grad.mul_(factor) for grad in ctx.saved_tensors)
        return *scaled, None, None, None, None, None


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    chunk: int,
    compiled: bool = False,
    dynamic: bool = False,
) -> torch.Tensor:
    """Return the sum over positions of -log softmax(hidden @ weight.T + bias)[label], in at least fp32.

    The shapes are hidden [..., d], weight [V, d] and labels [...], with `IGNORE_INDEX` at positions that are excluded. At
    most `chunk` rows of logits exist at once. With `compiled`, if gradients are needed, torch.compile fuses the work
    between the matrix products. With `dynamic`, it compiles once for all numbers of positions; otherwise, once per number.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Decided here, because inside a Function gradients are always off, and ctx.needs_input_grad is true even under no_grad.
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (flat, weight, bias))
    return _ChunkedCrossEntropy.apply(flat, weight, bias, labels.reshape(-1), chunk, compiled, dynamic, needs_grad)


def liger_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor
) -> torch.Tensor:
    """Return the same loss as `summed_cross_entropy`, computed by liger-kernel's Triton kernels.

    The kernels (https://github.com/linkedin/Liger-Kernel) choose their own chunks and read one number per call from
    the device. Gradients are summed in at least fp32, as in `summed_cross_entropy`.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    flat = hidden.reshape(-1, hidden.shape[-1])
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return liger_fused_linear_cross_entropy(
        flat, weight, labels.reshape(-1), bias, ignore_index=IGNORE_INDEX, reduction="sum", accum_dtype=wide
    )


def summed_loss(kernel: str, chunk: int, compiled: bool, dynamic: bool = False) -> SummedLoss:
    """Return the implementation of the loss that `parallel.loss_kernel` names; see `summed_cross_entropy` for the arguments.
    Raises ModelError if it is not available on this machine."""
    if kernel == "torch":
        return partial(summed_cross_entropy, chunk=chunk, compiled=compiled, dynamic=dynamic)
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(
            "parallel.loss_kernel is liger, but liger-kernel is not installed; pip install liger-kernel, or use torch"
        )
    if not torch.cuda.is_available():
        raise ModelError("parallel.loss_kernel is liger, which needs a GPU, and there is none; use torch")
    return liger_cross_entropy


class LossHead(nn.Linear):
    """Output head whose forward returns the summed loss for (hidden, labels), and logits for hidden alone."""

    chunk: int = 1024

    @classmethod
    def from_linear(cls, linear: nn.Linear, chunk: int) -> LossHead:
        """Return a LossHead that shares the weights of `linear`."""
        with torch.device("meta"):
            head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        head.weight, head.bias, head.chunk = linear.weight, linear.bias, chunk
        head.choose("torch", compiled=False)
        return head

    def choose(self, kernel: str, compiled: bool, dynamic: bool = False) -> None:
        """Choose the implementation of the loss; see `summed_loss`."""
        self._summed_loss = summed_loss(kernel, self.chunk, compiled, dynamic)

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return super().forward(hidden)
        return self._summed_loss(hidden, self.weight, self.bias, labels)
