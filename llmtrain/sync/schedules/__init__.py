"""Schedules: how a synchronization runs relative to training. Each schedule orders the operations of `BlockSync` differently."""
