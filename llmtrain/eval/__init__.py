"""Checkpoint evaluation: task suites run by lm-evaluation-harness, and losses on text files; see eval/README.md."""
