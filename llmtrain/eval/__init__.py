"""Evaluation of checkpoints: suites of tasks run by lm-evaluation-harness, losses on text files; see eval/README.md."""
