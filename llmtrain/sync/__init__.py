"""Synchronization of replicas: periods, penalties, outer steps and schedules. Works on tensors and process groups."""
