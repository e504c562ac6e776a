"""The training loop and what surrounds it: checkpoints, metrics, validation, signals."""
