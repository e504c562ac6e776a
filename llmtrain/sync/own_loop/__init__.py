"""Synchronization in a training loop of the user's own (docs/library.md). `LocalUpdates` is all of its interface."""
