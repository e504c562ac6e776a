"""Synchronization of replicas: periods, reductions, outer steps and schedules. This package needs only tensors and process groups.

`LocalUpdates` adds synchronization to your own training loop (docs/library.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmtrain.sync.own_loop.local_updates import LocalUpdates

__all__ = ["LocalUpdates"]


def __getattr__(name: str) -> Any:
    """Import `LocalUpdates`, and with it torch, at first use, because recipes are read without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from llmtrain.sync.own_loop.local_updates import LocalUpdates

    return LocalUpdates
