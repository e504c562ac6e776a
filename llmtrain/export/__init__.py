"""Export of a run's checkpoints to folders that transformers loads; see docs/export.md."""
