"""Document numbers and positions of tokens in rows of packed documents."""

from __future__ import annotations

import torch


def document_ids(input_ids: torch.Tensor, separator: int) -> torch.Tensor:
    """Return the number of each token's document in its row, from 0: [B, T]. A document ends with its `separator`."""
    ended = (input_ids == separator).cumsum(1)
    return torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], dim=1)


def position_ids(documents: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its document, from 0: [B, T].

    A document that begins before the row counts from the start of the row.
    """
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - torch.where(is_first, place, 0).cummax(1).values
