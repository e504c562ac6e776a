"""Base class of token sequences, as loaders read them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class Tokens(ABC):
    """Sequence of tokens. By default, all tokens exist: the sequence neither grows nor waits."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens that exist."""

    @abstractmethod
    def window(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length), which must exist. The array may be a read-only view."""

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens that the sequence can ever have."""
        return len(self)

    def is_waiting(self, seconds: float) -> bool:
        """Return whether a reader has waited for more tokens within the last `seconds`."""
        return False
