"""Reductions of pseudo-gradients."""
