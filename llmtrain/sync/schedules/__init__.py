"""Schedules: how a synchronization runs relative to training. Each orders the operations of `BlockSync` differently."""
