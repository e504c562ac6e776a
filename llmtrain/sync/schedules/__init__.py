"""Schedules: how a synchronization runs relative to training. Each orders the operations of `BlockSync` differently
and registers itself for its section of a recipe."""

from llmtrain.sync.schedules import blocking, delayed, layerwise, overlapped, wait_avoiding

__all__ = ["blocking", "delayed", "layerwise", "overlapped", "wait_avoiding"]
