"""Schedules: how a synchronization runs relative to training. Each schedule orders the operations of `BlockSync` differently,
and registers a function that builds it from its section of a recipe."""

from llmtrain.sync.schedules import blocking, delayed, layerwise, overlapped, wait_avoiding

__all__ = ["blocking", "delayed", "layerwise", "overlapped", "wait_avoiding"]
