"""Tests of what only a GPU shows: `pytest --gpu tests/gpu`, with torch, transformers, pytest and what llmtrain imports.

One GPU is enough; replicas share it, with gloo between them. On emulated GPUs (tests/emulated_gpu) the same tests run, so that
they are known to work before a GPU is at hand; what only a real one can show is skipped there.
"""
