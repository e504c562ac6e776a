"""Cross-entropy of a linear head without ever holding tokens x vocabulary logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100
"""Label of a position that does not count."""


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed loss and, while a chunk's logits exist, its share of both gradients: no recomputation in backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, chunk):  # hidden [P, d], weight [V, d], bias [V] or None, labels [P]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_grad = any(ctx.needs_input_grad[:3])
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if needs_grad and bias is not None else None
        for start in range(0, hidden.shape[0], chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk]
            logits = F.linear(h, weight, bias).to(wide)
            counts = y != IGNORED
            target = y.masked_fill(~counts, 0)[:, None]
            log_total = logits.logsumexp(dim=-1)
            loss += (log_total - logits.gather(1, target)[:, 0]).masked_fill(~counts, 0).sum()
            if needs_grad:
                grad = logits.sub_(log_total[:, None]).exp_()  # softmax, in the logits' own memory
                grad.scatter_add_(1, target, torch.full_like(target, -1, dtype=wide))
                grad = grad.mul_(counts[:, None]).to(hidden.dtype)
                torch.mm(grad, weight, out=grad_hidden[start : start + chunk])
                grad_weight += grad.T @ h
                if bias is not None:
                    grad_bias += grad.sum(0)
        if needs_grad:
            ctx.save_for_backward(
                grad_hidden, grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype)
            )
        return loss

    @staticmethod
    def backward(ctx, upstream):
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        scaled_bias = None if grad_bias is None else grad_bias * upstream.to(grad_bias.dtype)
        return (
            grad_hidden * upstream.to(grad_hidden.dtype),
            grad_weight * upstream.to(grad_weight.dtype),
            scaled_bias,
            None,
            None,
        )


def summed_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Sum over positions of -log softmax(hidden @ weight.T + bias)[label], in at least fp32.

    hidden [..., d], weight [V, d], labels [...] with `IGNORED` where a position does not count; at most `chunk`
    rows of logits exist at once.
    """
    return _ChunkedCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), chunk)


class LossHead(nn.Linear):
    """An output head that returns the summed loss for (hidden, labels), and logits for hidden alone."""

    chunk: int = 1024

    @classmethod
    def from_linear(cls, linear: nn.Linear, chunk: int) -> LossHead:
        """The same weights in a LossHead."""
        with torch.device("meta"):
            head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        head.weight, head.bias, head.chunk = linear.weight, linear.bias, chunk
        return head

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return super().forward(hidden)
        return summed_cross_entropy(hidden, self.weight, self.bias, labels, self.chunk)
