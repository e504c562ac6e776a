"""Estimates of a recipe's mesh, memory, traffic and time before it runs."""
