"""Training loops that are not ours, with llmtrain's synchronization: docs/library.md."""
