"""Reductions of pseudo-gradients. Importing this package registers all of them with `build_reduction`."""

from llmtrain.sync.reductions import edit_penalty, weighted_means

__all__ = ["edit_penalty", "weighted_means"]
