"""The training loop and its supporting code: checkpoints, metrics, validation and signals."""
