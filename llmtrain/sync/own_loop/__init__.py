"""Synchronization in a user's own training loop (docs/library.md). `LocalUpdates` is its complete interface."""
