"""Examples of llmtrain's synchronization in other training loops; see docs/library.md."""
