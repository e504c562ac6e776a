"""llmtrain: pretraining language models across slow or uneven networks."""

__version__ = "0.1.0"
