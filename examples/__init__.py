"""Examples of llmtrain's synchronization in training loops of your own; see docs/library.md."""
