"""Fused attention for GPT-Neo, which transformers computes without fused kernels, and for Llama, for which transformers makes
the host wait for the device.

GPT-Neo's attention is implemented here, because transformers computes it only with full [T, T] weights in fp32. In
its local layers, every query sees the last `window_size` keys. Attention is then computed in chunks of `window_size` queries,
which see the keys of their own chunk and of the previous one, so time and memory grow with T x window_size.

Llama's attention is transformers' own, registered under a name for which transformers builds no mask. To build a
mask, transformers inspects the positions for packed documents, which makes the host wait for the device in every
forward pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel


def document_ids(input_ids: torch.Tensor, separator: int) -> torch.Tensor:
    """Return the document number of each token in its row: [B, T].

    A document begins with the `separator` before its text, as a prompt does. The first token of the text is therefore
    predicted from the separator alone, and the last one predicts the next separator.
    """
    return (input_ids == separator).cumsum(1)


def position_ids(documents: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its document, from 0: [B, T].

    In a document that begins before the row, positions count from the start of the row.
    """
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(is_first, place, 0).cummax(1).values


FUSED_FAMILY = "gpt_neo"
"""Model type whose attention is replaced; for the others, transformers uses torch's fused kernels."""
CAUSAL_FAMILIES = {"llama"}
"""Model types in which every layer sees all earlier tokens and nothing else needs a mask."""
UNMASKED = "unmasked_sdpa"
"""Name under which transformers finds fused attention without building a mask. It is causal unless it is given a mask."""

AttentionInterface.register(UNMASKED, AttentionInterface()["sdpa"])

SHORT = 256
"""Largest number of queries for which attention in bf16 on a CPU avoids the fused kernel, which is slower for so few."""


def fuse_attention(causal_lm: PreTrainedModel, separates_documents: bool) -> None:
    """Replace GPT-Neo's attention in place, and keep its parameters and their names.

    Afterwards, the model expects each token's document number [B, 1, 1, T] as its `attention_mask`, and reads it only with
    `separates_documents`.
    """
    for layer in causal_lm.base_model.h:
        layer.attn.attention = GPTNeoAttention(layer.attn.attention, causal_lm.config, separates_documents)


def prepared_mask(family: str, input_ids: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor | None:
    """Return the `attention_mask` for input_ids [B, T]. With `documents` [B, T], no token sees another document.

    transformers passes a four-dimensional mask to its layers unchanged. If the result is None, it builds the masks it needs.
    """
    if family == FUSED_FAMILY:
        return (torch.zeros_like(input_ids) if documents is None else documents)[:, None, None]
    return causal_in_documents(documents) if family in CAUSAL_FAMILIES and documents is not None else None


class GPTNeoAttention(nn.Module):
    """GPT-Neo's attention, softmax(q k^T) v without the usual factor 1/sqrt(head size). It has no key-value cache."""

    def __init__(self, replaced: nn.Module, config: PretrainedConfig, separates_documents: bool):
        super().__init__()
        self.k_proj, self.v_proj, self.q_proj = replaced.k_proj, replaced.v_proj, replaced.q_proj
        self.out_proj = replaced.out_proj
        self.resid_dropout = replaced.resid_dropout
        self.heads, self.dropout = config.num_heads, config.attention_dropout
        self.window = config.window_size if replaced.attention_type == "local" else None
        self.separates_documents = separates_documents

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        """Map [B, T, d] to ([B, T, d], None); attention weights are not returned."""
        documents = None
        if self.separates_documents:
            assert attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
            documents = attention_mask[:, 0, 0]
        q, k, v = (
            proj(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, self.window, documents, dropout)
        return self.resid_dropout(self.out_proj(mixed.transpose(1, 2).flatten(2))), None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Return causal attention with unscaled dot products. q, k, v and the result are [B, H, T, head size].

    A query sees itself and all earlier keys. With a `window` of w, it sees only itself and the w - 1 keys before it.
    With `documents` [B, T], it sees only keys with its own document number.
    """
    length = q.shape[2]
    if window is not None and window < length:
        return _attend_in_chunks(q, k, v, window, documents, dropout)
    if documents is not None:
        return _attend_to(causal_in_documents(documents), q, k, v, dropout)
    if _prefers_products(q):
        return _attend_to(torch.ones(length, length, dtype=torch.bool).tril(), q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, scale=1.0)


def _prefers_products(q: torch.Tensor) -> bool:
    """Return whether two matrix products and a softmax are faster than torch's fused kernel, which in bf16 on a CPU takes up to
    four times as long for few queries."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT


def _attend_to(sees: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Return attention with unscaled dot products. Each query sees the keys for which the bool mask `sees` is true."""
    if not _prefers_products(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, dropout_p=dropout, scale=1.0)
    bias = torch.zeros_like(sees, dtype=q.dtype).masked_fill_(~sees, -torch.inf)
    weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
    return (F.dropout(weights, dropout) if dropout else weights) @ v


def causal_in_documents(documents: torch.Tensor) -> torch.Tensor:
    """Return the bool mask [B, 1, T, T] with which each query sees itself and the earlier keys that have its document
    number in `documents` [B, T]."""
    place = torch.arange(documents.shape[1], device=documents.device)
    sees = (place[:, None] >= place) & (documents[:, :, None] == documents[:, None, :])
    return sees[:, None]


def _attend_in_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, documents: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """Return the result of `attend`, computed in chunks: queries are [B x chunks, H, window, head size], and keys and
    values twice as long."""
    batch, length = q.shape[0], q.shape[2]
    chunks = -(-length // window)
    missing = chunks * window - length

    def chunked(x: torch.Tensor, before: int) -> torch.Tensor:  # [B, H, T, e] -> [B chunks, H, before + w, e]
        padded = F.pad(x, (0, 0, before, missing))
        return padded.unfold(2, before + window, window).permute(0, 2, 1, 4, 3).flatten(0, 1)

    row, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    sees = (row < key) & (key <= row + window)
    # Keys before the first token and after the last one are padding. No token's query sees them, those after the last
    # token because of causality. Padding queries see themselves, so that no softmax is over an empty set.
    is_there = torch.arange(chunks, device=q.device)[:, None, None] * window + key >= window
    sees = (sees & is_there).expand(batch, -1, -1, -1)
    if documents is not None:
        numbers = documents[:, None, :, None]
        of_rows, of_keys = chunked(numbers, 0), chunked(numbers, window)
        same = of_rows == of_keys.transpose(2, 3)
        sees = sees & same.unflatten(0, (batch, chunks))[:, :, 0]
    mixed = _attend_to(sees.flatten(0, 1)[:, None], chunked(q, 0), chunked(k, window), chunked(v, window), dropout)
    whole = mixed.unflatten(0, (batch, chunks)).transpose(1, 2).flatten(2, 3)
    return whole[:, :, :length]
