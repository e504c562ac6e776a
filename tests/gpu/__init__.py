"""Tests that need a GPU: `pytest --gpu tests/gpu`, with torch, transformers, pytest and what llmtrain imports.

One GPU is enough, because replicas share it and use gloo. The same tests run on emulated GPUs (tests/emulated_gpu), so
that they are known to work before a GPU is available. Tests of what only a real GPU shows are skipped there.
"""
