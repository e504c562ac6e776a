"""Test of access to a store that may stop answering."""

from __future__ import annotations

import pytest
from torch.distributed import DistError

from llmtrain.launch.timeout_store import TimeoutStore


def test_a_stores_own_error_is_raised_to_who_asked() -> None:
    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise DistError(f"{keys[0]}: connection reset")

    with pytest.raises(DistError, match=r"^ended: connection reset$"):
        TimeoutStore(Lost(), 10.0).check(["ended"])
