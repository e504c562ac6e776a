"""Evaluation of checkpoints: suites run by lm-evaluation-harness, losses on text files, and text that a model writes."""
